"""Read pickles without executing them."""
