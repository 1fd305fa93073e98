"""The file that `txl compress` writes: a header, blocks, and an end. Whatever was changed in it is refused.

    magic         8 bytes, the last of which is the version of the format
    header        length (4 bytes), JSON compressed by zlib, CRC-32
    each block    kind 1 (coded) or 2 (the text itself), length of the text, length of the content, CRC-32 of the text
                  (1, 4, 4, 4 bytes), the content, CRC-32
    end           kind 0, length of the whole text (8 bytes), its SHA-256 (32 bytes), CRC-32

Numbers are little-endian. Each CRC-32 at the end of a part is of the file up to it, so a part cannot be lost or moved.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from ..config.settings import Lengths
from ..mistake import Mistake
from .coding import Code

MAGIC, VERSION = b"\xf7txl\r\n\x1a", 1
MOST_HEADER, MOST_ROWS, MOST_BLOCK, MOST_THREADS = 1 << 16, 1 << 10, 1 << 26, 1 << 10
_END, _CODED, _RAW = range(3)
_LENGTH, _BLOCK, _LAST = struct.Struct("<I"), struct.Struct("<III"), struct.Struct("<Q32s")


@dataclass(frozen=True, kw_only=True)
class Header:
    """Everything that the decoder needs to repeat the encoder's computation, and to see that it can."""

    rows: int
    """Streams side by side, into which each block is cut."""
    block: int
    """Bytes of text in each block but the last."""
    threads: int
    precision: str
    test: str = ""
    """The SHA-256 of the self-test: what a new predictor computes for a fixed text."""
    machine: dict[str, str] = field(default_factory=dict)
    """Versions, processor and kernel, to say what differs."""
    learner: str = ""
    """Name of the settings of --learn."""
    model: str = ""
    """The digest of the run of --model."""
    lengths: dict[str, int] = field(default_factory=dict)
    """With --model: `Lengths`, without those that are None."""

    def __post_init__(self) -> None:
        wrong = [each.name for each in fields(self) if not _fits(str(each.type), getattr(self, each.name))]
        bounds = {"rows": MOST_ROWS, "block": MOST_BLOCK, "threads": MOST_THREADS}
        wrong += [name for name, most in bounds.items() if name not in wrong and not 1 <= getattr(self, name) <= most]
        if wrong or bool(self.learner) == bool(self.model):
            raise ValueError(f"wrong values of {', '.join(wrong) or 'learner and model'}")
        if self.model:
            Lengths(**self.lengths)


def _fits(kind: str, value: Any) -> bool:
    """Whether a value from JSON has the type of a field of `Header`."""
    if type(value) is dict:
        each = "int" if kind == "dict[str, int]" else "str"
        return kind.startswith("dict") and all(_fits(each, one) for one in value.values())
    return type(value).__name__ == kind


class Block(NamedTuple):
    """A coded block, the length of its text, and the CRC-32 of its text."""

    code: Code
    length: int
    crc: int


class Writer:
    """Writes an archive into a binary file. `size` is the number of bytes written."""

    def __init__(self, stream: Any, header: Header):
        self.stream: Any = stream
        self.size: int = 0
        self.crc: int = 0
        self.length: int = 0
        self.digest: Any = hashlib.sha256()
        given = {name: value for name, value in asdict(header).items() if value}
        packed = zlib.compress(json.dumps(given, separators=(",", ":")).encode(), 9)
        self._write(MAGIC + bytes([VERSION]) + _LENGTH.pack(len(packed)) + packed)

    def block(self, text: bytes, code: Code) -> None:
        """Write a block with this text and code."""
        kind = _RAW if code.raw else _CODED
        numbers = _BLOCK.pack(len(text), len(code.content), zlib.crc32(text))
        self.digest.update(text)
        self.length += len(text)
        self._write(bytes([kind]) + numbers + code.content)

    def end(self) -> None:
        """Write the end. Without it the archive is not whole."""
        self._write(bytes([_END]) + _LAST.pack(self.length, self.digest.digest()))

    def _write(self, part: bytes) -> None:
        self.crc = zlib.crc32(part, self.crc)
        self.stream.write(part + _LENGTH.pack(self.crc))
        self.size += len(part) + _LENGTH.size
        self.stream.flush()


class Archive:
    """Reads a binary file: first the `header`, then the `blocks`, one at a time. `name` is the file in errors.

    Raises:
        Mistake: it is not an archive, or not as it was written.
    """

    def __init__(self, stream: Any, name: str):
        self.stream: Any = stream
        self.name: str = name
        self.length: int = 0
        self.sha256: bytes = b""
        magic = stream.read(len(MAGIC) + 1)
        if magic[:-1] != MAGIC:
            raise Mistake(f"{name} must be an archive that txl compress wrote, and is not.")
        if magic[-1] != VERSION:
            raise Mistake(f"{name} has version {magic[-1]} of the format, and this program reads {VERSION}.")
        self.crc: int = zlib.crc32(magic)
        self.size: int = len(magic)
        """Number of bytes read."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MOST_HEADER:
            raise self._damage()
        packed = self._read(length)
        self._check()
        self.header: Header = self._header(packed)

    def blocks(self) -> Iterator[Block]:
        """Every block. After the last, `length` and `sha256` are those of the whole text."""
        while (kind := self._read(1)[0]) in (_CODED, _RAW):
            length, size, crc = _BLOCK.unpack(self._read(_BLOCK.size))
            if not 0 < length <= self.header.block or size > length or (kind == _RAW and size != length):
                raise self._damage()
            code = Code(kind == _RAW, self._read(size))
            self._check()
            yield Block(code, length, crc)
        if kind != _END:
            raise self._damage()
        self.length, self.sha256 = _LAST.unpack(self._read(_LAST.size))
        self._check()
        if self.stream.read(1):
            raise Mistake(f"{self.name} has more bytes after its end. Restore it from a copy.")

    def check(self) -> None:
        """Read all blocks and compare every checksum."""
        for _ in self.blocks():
            pass

    def _header(self, packed: bytes) -> Header:
        try:
            return Header(**json.loads(zlib.decompressobj().decompress(packed, MOST_HEADER)))
        except (zlib.error, ValueError, TypeError, RecursionError) as error:
            raise Mistake(f"{self.name} has a header that this program cannot read: {error}.") from error

    def _read(self, count: int) -> bytes:
        """Exactly this number of bytes."""
        part = self.stream.read(count)
        if len(part) < count:
            raise Mistake(f"{self.name} ends too early. Copy or download it again.")
        self.crc = zlib.crc32(part, self.crc)
        self.size += count
        return part

    def _check(self) -> None:
        """Compare the CRC-32 of the file so far with the stored one, which is not part of it."""
        crc = self.crc
        (stored,) = _LENGTH.unpack(self._read(_LENGTH.size))
        self.crc = crc
        if stored != crc:
            raise self._damage()

    def _damage(self) -> Mistake:
        return Mistake(f"{self.name} is damaged: a checksum is wrong. Copy or download it again.")
