"""Read TensorFlow's checkpoints (V2, "tensor bundles") without TensorFlow.

PREFIX.index is a table in leveldb's format: blocks of sorted keys, where each key is stored as its difference to the
previous one; a block that lists these blocks; and a footer with the offset of that list. A key is the name of a
variable. Its value is a protocol buffer with the offset of the numbers in PREFIX.data-00000-of-00001.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from ..runtime.files import plain_file, read_errors

_DTYPES = {1: torch.float32, 2: torch.float64, 14: torch.bfloat16, 19: torch.float16}
_FOOTER = 48
_MAGIC = bytes.fromhex("57fb808b247547db")
_ADVICE = "Copy the whole checkpoint again, or save it anew."
_DAMAGE = ValueError, RuntimeError, IndexError
"""Errors of damaged files: this file's, and numpy's and torch's for impossible sizes."""


def read_bundle(prefix: Path) -> dict[str, Tensor | None]:
    """The variables of a checkpoint by name, as views of memory-mapped files; None if they are no fractions.

    Raises:
        FileNotFoundError: PREFIX.index or one of its data files is missing.
        ValueError: a file is damaged or of another kind, or a variable is stored in an unsupported way.
    """
    index = _index(prefix)
    with read_errors(index, _ADVICE, *_DAMAGE):
        entries = dict(_table(memoryview(plain_file(index).read_bytes())))
        header = _Message(entries.pop(b"", memoryview(b"")))
        if header.numbers[2]:
            raise ValueError("it was written on a big-endian machine")
        # A name that begins with a zero is a slice of a variable. The variable has a separate entry.
        stored = {key.decode(): _Message(value) for key, value in entries.items() if key[0]}
    shards: dict[Path, UInt8[np.ndarray, " N"]] = {}
    tensors: dict[str, Tensor | None] = dict.fromkeys(stored)
    for name, entry in stored.items():
        if entry.numbers[1] in _DTYPES:
            path = prefix.with_name(f"{prefix.name}.data-{entry.numbers[3]:05d}-of-{header.numbers[1]:05d}")
            with read_errors(path, _ADVICE, *_DAMAGE):
                if path not in shards:  # written to, it would not change the file
                    shards[path] = np.memmap(plain_file(path), np.uint8, mode="c")
                tensors[name] = _tensor(name, entry, shards[path])
    return tensors


def find_bundle(path: Path) -> Path:
    """The prefix of a checkpoint; `path` is the prefix, one of its files, or its folder.

    In a folder, the checkpoint with the highest step is taken.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    suffix = re.compile(r"\.(index|meta|data-\d{5,}-of-\d{5,})$")
    prefix = _latest(path) if path.is_dir() else path.with_name(suffix.sub("", path.name) or path.name)
    if not plain_file(_index(prefix)).exists():
        raise FileNotFoundError(
            f"{path} is no TensorFlow checkpoint: {_index(prefix)} is missing. Name a folder with model.ckpt-N.index "
            "and its data files in it, or the path up to model.ckpt-N."
        )
    return prefix


def _latest(folder: Path) -> Path:
    def step(index: Path) -> int:
        number = re.search(r"-(\d+)$", index.stem)
        return int(number[1]) if number else -1

    return max(folder.glob("*.index"), key=step, default=folder / "model.ckpt.index").with_suffix("")


def _index(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.index")


def _tensor(name: str, entry: _Message, shard: UInt8[np.ndarray, " N"]) -> Tensor:
    """A variable. Its entry has the type (1), the shape (2), the shard (3), the offset (4), the size (5), parts (7)."""
    if entry.parts[7]:
        raise ValueError(f"{name} is partitioned into slices, which are not put together here")
    dtype, offset, size = _DTYPES[entry.numbers[1]], entry.numbers[4], entry.numbers[5]
    shape = tuple(_Message(length).numbers[1] for sizes in entry.parts[2] for length in _Message(sizes).parts[2])
    data = shard[offset : offset + size]
    if len(data) < size or size != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} of shape {list(shape)} takes {size} bytes from {offset} of {len(shard)}")
    raw = torch.from_numpy(data if offset % dtype.itemsize == 0 else data.copy())
    return raw.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


def _table(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield keys and values in order."""
    if len(data) < _FOOTER or data[-8:] != _MAGIC:
        raise ValueError("it does not end as an index does")
    footer = _Cursor(data[-_FOOTER:-8])
    _, blocks = [(footer.varint(), footer.varint()) for _ in range(2)]
    for _, handle in _block(data, *blocks):
        cursor = _Cursor(handle)
        yield from _block(data, cursor.varint(), cursor.varint())


def _block(data: memoryview, offset: int, size: int) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the keys and values of a block. A list of restarts ends it, and the byte after it says how it is packed."""
    content, compression = data[offset : offset + size], data[offset + size]
    if compression:
        raise ValueError("it is compressed")
    restarts = 4 * (1 + int.from_bytes(content[-4:], "little"))
    entries, key = _Cursor(content[: max(size - restarts, 0)]), b""
    while entries.left:
        shared, unshared, length = (entries.varint() for _ in range(3))
        key = key[:shared] + bytes(entries.take(unshared))
        yield key, entries.take(length)


class _Cursor:
    """Reads bytes in order, and raises `ValueError` at the end."""

    def __init__(self, data: memoryview):
        self.left = data

    def take(self, size: int) -> memoryview:
        if size > len(self.left):
            raise ValueError("it is cut short")
        taken, self.left = self.left[:size], self.left[size:]
        return taken

    def varint(self) -> int:
        """Read an integer: seven bits per byte, lowest first. All bytes except the last have the eighth bit set."""
        value = 0
        for shift in range(0, 64, 7):
            (byte,) = self.take(1)
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("it has a number of more than 64 bits")


class _Message:
    """A protocol buffer: `numbers` and `parts` (messages or text) by field number."""

    def __init__(self, data: memoryview):
        self.numbers = dict.fromkeys(range(1, 6), 0)  # an absent number is 0
        self.parts: dict[int, list[memoryview]] = {2: [], 7: []}
        cursor = _Cursor(data)
        while cursor.left:
            field, kind = divmod(cursor.varint(), 8)
            if kind == 2:
                self.parts.setdefault(field, []).append(cursor.take(cursor.varint()))
            elif kind == 5:
                cursor.take(4)  # a checksum
            elif kind == 0:
                self.numbers[field] = cursor.varint()
            else:
                raise ValueError("it has a field of an unknown kind")
