"""Read TensorFlow's checkpoints (V2, "tensor bundles") without TensorFlow.

PREFIX.index is a table in leveldb's format: blocks of sorted keys, where each key is stored as its difference to the
previous one; a block that lists these blocks; and a footer with the offset of that list. A key is the name of a
variable. Its value is a protocol buffer with the offset of the numbers in PREFIX.data-00000-of-00001. Blocks and
variables have a CRC-32C, and each is checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from ..mistake import Mistake

_DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    19: torch.float16,
}
_FOOTER = 48
_MAGIC = bytes.fromhex("57fb808b247547db")
_LARGEST_INDEX, _VARIABLES, _LONGEST_NAME, _DIMENSIONS, _LARGEST_SHAPE = 2**22, 2**14, 1000, 64, 2**48
"""Limits on the memory and time that a forged file can take. TensorFlow's files are far below them."""


class _Entry(NamedTuple):
    """The location, type and checksum of a variable."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int


def read_bundle(prefix: Path) -> dict[str, Tensor | None]:
    """The variables of a checkpoint by name, as views of memory-mapped files; None for types that torch lacks.

    Raises:
        FileNotFoundError: PREFIX.index or one of its data files is missing.
        ValueError: a file is damaged or of another kind, or a variable is stored in an unsupported way.
    """
    entries, count = _read_index(prefix)
    shards: dict[Path, UInt8[np.ndarray, " N"]] = {}
    tensors: dict[str, Tensor | None] = dict.fromkeys(entries)
    for name, entry in entries.items():
        if entry.dtype in _DTYPES:
            path = prefix.with_name(f"{prefix.name}.data-{entry.shard:05d}-of-{count:05d}")
            if path not in shards:
                with _readable(path):
                    shards[path] = np.memmap(path, np.uint8, mode="c")  # written to, it would not change the file
            with _readable(path):
                tensors[name] = _tensor(name, entry, shards[path])
    return tensors


def find_bundle(path: Path) -> Path:
    """The prefix of the checkpoint at `path`: a prefix, one of the checkpoint's files, or a folder.

    In a folder, the checkpoint with the highest step is taken.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    suffix = re.compile(r"\.(index|meta|data-\d{5,}-of-\d{5,})$")
    prefix = _latest(path) if path.is_dir() else path.with_name(suffix.sub("", path.name) or path.name)
    if not _index(prefix).is_file():
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


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, or no regular file. Get it, and all that belongs to it.")
    try:
        yield
    except ValueError as error:
        raise Mistake(
            f"{path} cannot be read as a file of a TensorFlow checkpoint: {error}. Copy it again, or save it anew."
        ) from error


def _tensor(name: str, entry: _Entry, shard: UInt8[np.ndarray, " N"]) -> Tensor:
    dtype = _DTYPES[entry.dtype]
    data = shard[entry.offset : entry.offset + entry.size]
    if len(data) < entry.size:
        raise Mistake(f"{name} takes {entry.size} bytes from {entry.offset}, and the file has {len(shard)}")
    if _mask_crc(crc32c(data)) != entry.checksum:
        raise Mistake(f"the checksum of {name} is wrong")
    if not entry.size:
        return torch.empty(entry.shape, dtype=dtype)
    raw = torch.from_numpy(data if entry.offset % dtype.itemsize == 0 else data.copy())
    return (raw != 0 if dtype == torch.bool else raw.view(dtype)).view(entry.shape)


def _read_index(prefix: Path) -> tuple[dict[str, _Entry], int]:
    """The entries by name, and the number of data files."""
    path = _index(prefix)
    with _readable(path):
        if (size := path.stat().st_size) > _LARGEST_INDEX:
            raise Mistake(f"it has {size:,} bytes")
        values = dict(islice(_table(memoryview(path.read_bytes())), _VARIABLES))
        if len(values) == _VARIABLES:
            raise Mistake(f"it has {_VARIABLES:,} variables or more")
        if b"" not in values:
            raise Mistake("it has no header")
        header = _Message(values.pop(b""))
        if header.numbers[2]:
            raise Mistake("it was written on a big-endian machine")
        count = header.numbers[1]
        # A name that begins with a zero is a slice of a variable. The variable has a separate entry.
        named = {_name(key): value for key, value in values.items() if key[0]}
        entries = {name: _entry(name, _Message(value), count) for name, value in named.items()}
        return entries, count


def _name(key: bytes) -> str:
    name = key.decode()
    if not name.isprintable():
        raise Mistake(f"it has the name {name[:60]!a}")
    return name


def _entry(name: str, stored: _Message, shards: int) -> _Entry:
    shape = tuple(_Message(size).numbers[1] for shape in stored.parts[2][-1:] for size in _Message(shape).parts[2])
    dtype, shard, offset, size, checksum = (stored.numbers[field] for field in (1, 3, 4, 5, 6))
    if stored.parts[7]:
        raise Mistake(f"{name} is partitioned into slices, which are not put together here")
    if shard >= shards:
        raise Mistake(f"{name} is in data file {shard} of {shards}")
    if dtype in _DTYPES:
        if len(shape) > _DIMENSIONS or math.prod(max(n, 1) for n in shape) > _LARGEST_SHAPE:
            raise Mistake(f"{name} has an absurd shape")
        if size != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise Mistake(f"{name} of shape {list(shape)} takes {size} bytes")
    return _Entry(dtype, shape, shard, offset, size, checksum)


def _table(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield keys and values in order. Every byte of the file is checked."""
    if len(data) < _FOOTER or data[-8:] != _MAGIC:
        raise Mistake("it does not end as an index does")
    footer = _Cursor(data[-_FOOTER:-8])
    extra, blocks = [(footer.varint(), footer.varint()) for _ in range(2)]
    if any(footer.left) or list(_block(data, *extra)):
        raise Mistake("its footer is damaged, or it has entries of another program")
    end = 0
    for _, handle in _block(data, *blocks):
        cursor = _Cursor(handle)
        offset, size = cursor.varint(), cursor.varint()
        if offset < end:
            raise Mistake("its blocks overlap")
        end = offset + size
        yield from _block(data, offset, size)


def _block(data: memoryview, offset: int, size: int) -> Iterator[tuple[bytes, memoryview]]:
    content, trailer = data[offset : offset + size], data[offset + size : offset + size + 5]
    if len(trailer) < 5:
        raise Mistake("it is cut short")
    if _mask_crc(crc32c(np.frombuffer(data[offset : offset + size + 1], np.uint8))) != _little(trailer[1:]):
        raise Mistake(f"the checksum of the block at {offset} is wrong")
    if trailer[0]:
        raise Mistake("it is compressed")
    restarts = 4 * (1 + _little(content[-4:]))
    if restarts > size:
        raise Mistake(f"the block at {offset} is damaged")
    entries, key = _Cursor(content[: size - restarts]), b""
    while entries.left:
        shared, unshared, length = (entries.varint() for _ in range(3))
        if shared > len(key) or shared + unshared > _LONGEST_NAME:
            raise Mistake(f"the block at {offset} is damaged")
        key = key[:shared] + bytes(entries.take(unshared))
        yield key, entries.take(length)


class _Cursor:
    """Reads bytes in order, and raises `Mistake` at the end."""

    def __init__(self, data: memoryview):
        self.left = data

    def take(self, size: int) -> memoryview:
        if size > len(self.left):
            raise Mistake("it is cut short")
        taken, self.left = self.left[:size], self.left[size:]
        return taken

    def varint(self) -> int:
        """Read an integer: seven bits per byte, lowest first. All bytes except the last have the eighth bit set."""
        value = 0
        for shift in range(0, 64, 7):
            (byte,) = self.take(1)
            value |= (byte & 127) << shift
            if byte < 128 and value < 1 << 64:
                return value
        raise Mistake("it has a number of more than 64 bits")


class _Message:
    """A protocol buffer: `numbers` and `parts` (messages or text) by field number."""

    def __init__(self, data: memoryview):
        self.numbers = dict.fromkeys(range(1, 7), 0)  # an absent number is 0
        self.parts: dict[int, list[memoryview]] = {2: [], 7: []}
        cursor = _Cursor(data)
        while cursor.left:
            field, kind = divmod(cursor.varint(), 8)
            if kind == 2:
                self.parts.get(field, []).append(cursor.take(cursor.varint()))
                continue
            if kind not in (0, 1, 5):
                raise Mistake("it has a field of an unknown kind")
            number = _little(cursor.take(8 if kind == 1 else 4)) if kind else cursor.varint()
            if field in self.numbers:
                self.numbers[field] = number


def _little(data: memoryview) -> int:
    return int.from_bytes(data, "little")


_ONES_BEFORE = np.frombuffer(bytes.fromhex("54641f64"), np.uint8)
"""The bytes that set an empty register to 32 ones, the initial state of CRC-32C."""


def crc32c(data: UInt8[np.ndarray, " N"]) -> int:
    """The checksum (Castagnoli's polynomial). The data is divided into lanes of equal width, read in parallel.

    The register is linear over bits: `moved` has the value of each of its bits after the width of a lane.
    """
    table = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(16):
        table = table >> 1 ^ 0x82F63B78 * (table & 1)
    lanes = min(1 << 14, 1 + len(data) // 256)
    text = np.zeros((lanes, 2 * -(-(len(data) + 4) // (2 * lanes))), np.uint8)  # leading zeros change nothing
    text.reshape(-1)[text.size - len(data) - 4 :] = np.concatenate([_ONES_BEFORE, data])
    registers, moved = np.zeros(lanes, np.uint32), np.uint32(1) << np.arange(32, dtype=np.uint32)
    for column in np.ascontiguousarray(text.view("<u2").T):
        registers = table[(registers ^ column) & 0xFFFF] ^ registers >> 16
        moved = table[moved & 0xFFFF] ^ moved >> 16
    crc = 0
    for register in registers.tolist():
        crc = register ^ int(np.bitwise_xor.reduce(moved[(crc >> np.arange(32) & 1).astype(bool)]))
    return crc ^ 0xFFFFFFFF


def _mask_crc(crc: int) -> int:
    """The checksum as stored in files. It is masked, because data that ends with its own CRC has a constant CRC."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
