"""Reads this process's rank from the variables that torchrun sets. Imports no torch."""

from __future__ import annotations

import os
import re

from ..mistake import Mistake

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Ranks need all of these variables. A scheduler may export some of them without launching anything."""


def rank_and_size() -> tuple[int, int]:
    """The rank of this process and the number of ranks: (0, 1) unless all variables of a launch are set."""
    if _missing_variables():
        return 0, 1
    rank, size, port = map(variable, ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= size or port >= 1 << 16:
        raise Mistake(
            f"The variable RANK must be below WORLD_SIZE, and MASTER_PORT below 65,536, got {rank}, {size} and {port}. "
            "Start with torchrun, or unset RANK."
        )
    return rank, size


def variable(name: str) -> int:
    """A variable of the launcher as a number, 0 if it is not set."""
    word = os.environ.get(name, "").strip() or "0"
    if not re.fullmatch("[0-9]{1,9}", word):
        raise Mistake(
            f"The variable {name} must be a whole number, as torchrun sets it, got {word!r}. Start with torchrun, or "
            f"unset {name}."
        )
    return int(word)


def launch_warning() -> str:
    """A warning if WORLD_SIZE, or SLURM_NTASKS without it, names several processes and another variable of a launch is
    missing; otherwise "".

    Raises:
        Mistake: RANK is set too, so other processes would train the same, each alone.
    """
    name = "WORLD_SIZE" if os.environ.get("WORLD_SIZE", "").strip() else "SLURM_NTASKS"
    size, missing = os.environ.get(name, "").strip(), _missing_variables()
    if size in ("", "0", "1") or not missing:
        return ""
    if "RANK" not in missing:
        raise Mistake(
            f"A launch of several processes must set {' and '.join(missing)}: {name} is {size} and RANK "
            f"{os.environ['RANK']}. Start with torchrun, or unset RANK and WORLD_SIZE to train in one process."
        )
    return f"{name} is {size} without {', '.join(missing)}: this process trains alone. torchrun sets all of them."


def _missing_variables() -> list[str]:
    return [name for name in _NEEDED if not os.environ.get(name, "").strip()]
