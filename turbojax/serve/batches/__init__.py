"""OpenAI's files and batches: requests in a JSONL file, answered in the background, kept in a folder."""
