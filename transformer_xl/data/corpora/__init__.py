"""Published corpora: their addresses, and the way from their files to token stores."""
