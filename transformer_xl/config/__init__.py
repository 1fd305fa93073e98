"""What can be set."""
