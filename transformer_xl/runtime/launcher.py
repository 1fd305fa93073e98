"""What a launcher of several processes, torchrun, says of this one in its environment. No torch is imported."""

from __future__ import annotations

import os
import re

from ..mistake import Mistake

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables without which ranks cannot meet. A scheduler may export some of them without launching anything."""


def launched() -> tuple[int, int]:
    """The rank of this process and the number of ranks: (0, 1) unless all variables of a launch are set.

    Raises:
        ValueError: they are set, and are not what torchrun sets.
    """
    if _missing():
        return 0, 1
    rank, size, port = map(number, ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= size or port >= 1 << 16:
        raise Mistake(
            f"The variable RANK must be below WORLD_SIZE, and MASTER_PORT below 65,536, got {rank}, {size} and {port}. "
            "Start with torchrun, or unset RANK."
        )
    return rank, size


def number(name: str) -> int:
    """A variable of the launcher, 0 where it is not set; `ValueError` where it is no whole number."""
    word = os.environ.get(name, "").strip() or "0"
    if not re.fullmatch("[0-9]{1,9}", word):
        raise Mistake(
            f"The variable {name} must be a whole number, as torchrun sets it, got {word!r}. Start with torchrun, or "
            f"unset {name}."
        )
    return int(word)


def half_launched() -> str:
    """A warning if WORLD_SIZE asks for several processes and another variable of a launch is missing; else empty."""
    size, missing = os.environ.get("WORLD_SIZE", "").strip(), _missing()
    if size in ("", "0", "1") or not missing:
        return ""
    return f"WORLD_SIZE is {size} without {', '.join(missing)}: this process trains alone. torchrun sets all of them."


def _missing() -> list[str]:
    return [name for name in _NEEDED if not os.environ.get(name, "").strip()]
