"""What goes over the wire: requests and responses of OpenAI's protocol as pydantic models."""
