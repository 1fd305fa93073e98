"""`python -m transformer_xl` is `txl`."""

import sys

from .commands.main import main

if __name__ == "__main__":
    sys.exit(main())
