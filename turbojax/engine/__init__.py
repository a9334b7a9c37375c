"""The host side of generation: requests, pages and scheduling in plain Python, free of jax."""
