"""Reading pickles without executing them."""
