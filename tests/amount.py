"""How many examples hypothesis tries: all of them in `make test-all`, a third of them in `make test`."""

from __future__ import annotations

import os

ALL = os.environ.get("TXL_ALL_EXAMPLES") == "1"


def examples(count: int) -> int:
    return count if ALL else max(count // 3, 4)
