"""Settings and recipes."""
