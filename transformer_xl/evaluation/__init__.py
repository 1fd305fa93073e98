"""What a trained model says of text, and text it writes."""
