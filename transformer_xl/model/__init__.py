"""The model: Transformer-XL and its baselines."""
