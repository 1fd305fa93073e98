"""The source of Python's own library, a text that every machine has: for `txl demo` and the paper's tables."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"}
LEFT_OUT |= {"site-packages", "dist-packages", "__pycache__"}
HELD_OUT, VALIDATION = 500_000, 100_000
"""Minimum number of bytes of the test and valid splits, in whole files."""


def library() -> dict[str, dict[str, bytes]]:
    """The library's source files by split and name. A hash of its name decides the split of a file.

    Raises:
        FileNotFoundError: this Python has no source of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    kept: list[Path] = []
    for folder, below, files in os.walk(root):
        below[:] = set(below) - LEFT_OUT  # os.walk does not enter these
        kept += [Path(folder, file).relative_to(root) for file in files if file.endswith(".py")]
    by_hash = sorted(kept, key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    splits: dict[str, dict[str, bytes]] = {"train": {}, "valid": {}, "test": {}}
    wanted = {"test": HELD_OUT, "valid": VALIDATION}
    for name in by_hash:
        text = (root / name).read_bytes()
        split = next((split for split, size in wanted.items() if size > 0), "train")
        splits[split][name.as_posix()] = text
        wanted[split] = wanted.get(split, 0) - len(text)
    train = sum(map(len, splits["train"].values()))
    if train < HELD_OUT:
        raise FileNotFoundError(f"{root} holds too little Python source to learn from: this Python came without it.")
    return {split: dict(sorted(files.items())) for split, files in splits.items()}
