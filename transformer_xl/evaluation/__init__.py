"""Scores texts with trained models, and generates text."""
