"""Published corpora: where they are, and how they become token stores."""
