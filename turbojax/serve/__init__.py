"""The server: OpenAI's protocol over HTTP, on one pipeline (extra `serve`)."""
