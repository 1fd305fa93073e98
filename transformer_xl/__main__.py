"""`python -m transformer_xl` is `txl`."""

import sys

from transformer_xl.cli import main

if __name__ == "__main__":
    sys.exit(main())
