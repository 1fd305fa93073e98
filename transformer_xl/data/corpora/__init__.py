"""Published corpora: their addresses, and the code that converts their files to token stores."""
