"""Texts read piece by piece, from memory or from files, compressed or plain; every piece a whole number of symbols."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformer_xl.data.bpe import border as bpe_border
from transformer_xl.data.vocab import Unit
from transformer_xl.files import plain_file

Text = bytes | Path
"""A text in memory, or the file that holds it."""
OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
DAMAGE = (zlib.error, lzma.LZMAError, EOFError, gzip.BadGzipFile)
"""What damaged files raise, besides an `OSError` without a number."""
_PIECE = 1 << 18
"""Bytes of text at a time: what is made of them stays in the cache."""
_LONGEST = 1 << 12
"""How far before the end of a piece a place to cut it is looked for, in bytes."""
_WHITE = re.compile(rb"[ \n]")


def expanded(path: str | Path) -> Path:
    """`path`, where ~ begins it with the user's home, or ~NAME with that of a user there is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def open_file(path: Path) -> io.BufferedIOBase:
    """A file to read, decompressed where its name ends in .xz, .gz or .bz2; a pipe or a device may never end."""
    return OPENERS.get(path.suffix, open)(plain_file(path), "rb")


def read_file(path: Path) -> bytes:
    """The content of `path`, decompressed where its name says so; errors say which file and why."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} must be a file, and is a folder.")
    with reading(path), open_file(path) as opened:
        return opened.read()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say which file could not be read, and why."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no file {path}.") from error
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(f"Cannot read {path}: {error.strerror or error}.") from error
        reason = str(error).rstrip(".") or type(error).__name__
        raise ValueError(f"{path} is not a sound {path.suffix} file: {reason}. Download it again.") from error


def border(text: bytes, position: int, unit: Unit) -> int:
    """The first place from `position` on where `text` can be cut without cutting a symbol."""
    if unit == "word":
        white = _WHITE.search(text, position)
        return white.end() if white else len(text)
    if unit == "char":
        while position < len(text) and text[position] & 0xC0 == 0x80:
            position += 1
    return min(position, len(text))


def pieces(text: Text, unit: Unit, size: int = _PIECE) -> Iterator[bytes]:
    """`text` in pieces whose symbols are the symbols of the whole, so that memory stays small.

    A last line of words that lacks its end gets one.
    """
    left, ends_line = bytearray(), True  # which grows in place, however far the next border is
    for chunk in _chunks(text, size):
        ends_line = chunk.endswith(b"\n")
        searched = len(left)
        left += chunk
        end = _last_border(left, unit, searched)
        if end:
            yield bytes(left[:end])
            del left[:end]
    if unit == "word" and not ends_line:
        left += b"\n"
    if left:
        yield bytes(left)


def _chunks(text: Text, size: int) -> Iterator[bytes]:
    if isinstance(text, bytes):
        yield from (text[start : start + size] for start in range(0, len(text), size))
    else:
        with reading(text), open_file(text) as opened:
            yield from iter(lambda: opened.read(size), b"")


def _last_border(text: bytearray, unit: Unit, searched: int) -> int:
    """The last place where `text`, which may go on, can be cut without cutting a symbol; 0 if there is none.

    None is in the first `searched` bytes.
    """
    if unit == "word":
        return max(text.rfind(b" ", searched), text.rfind(b"\n", searched)) + 1
    if unit == "bpe":
        place = bpe_border(text, max(len(text) - _LONGEST, 0))
        return place if place < len(text) else 0
    end = len(text)
    if unit == "char":
        while end and text[end - 1] & 0xC0 == 0x80:
            end -= 1
        end -= bool(end) and text[end - 1] >= 0xC0
    return end
