"""What a model is: static specs, families that map HF configs to them, weights and their loading."""
