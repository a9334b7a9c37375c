"""A page at `/`: chat with the model, and how busy the server is."""
