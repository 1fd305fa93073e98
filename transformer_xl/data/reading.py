"""Read texts in pieces, from memory or from files, compressed or plain. No piece ends inside a token.

The text of a `.jsonl` file is that of its lines. Each of them is a document.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config.settings import Unit
from ..mistake import Mistake
from ..runtime.files import check_unpacked, plain_file, read_errors
from .subwords import cuts
from .tables import is_table, row_texts


@dataclass(frozen=True)
class Span:
    """The text of a file, from byte (of a table: row) `start` to `end`. An `end` of None is the end of the file."""

    file: Path
    start: int = 0
    end: int | None = None
    column: str = ""
    """Of a table, and of JSON lines; see `CorpusConfig`."""


Text = bytes | Span
"""A text in memory, or in a file."""
OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
_PIECE = 1 << 18
"""Number of bytes to read at a time. A piece and its ids then fit into the processor's cache."""
_SHORT = 1 << 14
"""A document of fewer bytes is one piece, because each piece is a call of a tokenizer."""
LONGEST = 1 << 26
"""Maximum number of bytes of a word or of a line of JSON."""
WHITE = b" \n\t\r"
"""What words are cut at; `str.split` knows more."""


def expand_home(path: str | Path) -> Path:
    """Replace a leading ~ or ~NAME by the home folder of the user; keep it if NAME is unknown."""
    return Path(os.path.expanduser(path))


def open_file(path: Path) -> io.BufferedIOBase:
    """Open a file for reading, decompressed if its name ends in .xz, .gz or .bz2. Pipes and devices are refused."""
    return OPENERS.get(path.suffix, open)(plain_file(path), "rb")


def read_file(path: Path) -> bytes:
    """The content of a file, decompressed as in `open_file`. Errors name the file and the reason."""
    return b"".join(chunks(Span(path)))


def pieces(text: Text, unit: Unit, size: int = _PIECE) -> Iterator[bytes]:
    """The `parts` of all documents of `text`, which together have the tokens of the whole text. This saves memory."""
    for document in documents(text):
        yield from parts(document, unit, size)


def parts(text: Text, unit: Unit | Literal["line"], size: int = _PIECE) -> Iterator[bytes]:
    """The bytes of `text`, about `size` at a time. No part ends inside a token of the unit; with "line", inside a line.

    For words, a missing end of the last line is added.
    """
    left, ends_line = bytearray(), True  # a bytearray grows in place, also if the next border is far
    whole = isinstance(text, bytes) and len(text) < min(size, _SHORT)
    for chunk in chunks(text, size):
        ends_line = chunk.endswith(b"\n")
        searched = len(left)
        left += chunk
        end = 0 if whole else _last_border(left, unit, searched)
        if end:
            part = bytes(left[:end])
            del left[:end]  # before the part is used, because a line may be large
            yield part
        if len(left) > LONGEST:
            name, what = "The text" if isinstance(text, bytes) else text.file, "line" if unit == "line" else "word"
            raise Mistake(f"{name} has a {what} of more than {LONGEST:,} bytes. Cut it, or choose another unit.")
    if unit == "word" and not ends_line:
        left += b"\n"
    if left:
        yield bytes(left)


def plain_name(path: Path) -> str:
    """The name of a file without .xz, .gz or .bz2."""
    return path.stem if path.suffix in OPENERS else path.name


def is_jsonl(path: Path) -> bool:
    """Whether a file has JSON lines, compressed or plain, by its name."""
    return plain_name(path).lower().endswith(".jsonl")


def documents(text: Text) -> Iterator[Text]:
    """The documents of a text: the text of each row of a table, or line of a `.jsonl` file, or `text`.

    Blank lines and rows without a text have none.

    Raises:
        Mistake: a line is neither a JSON string nor an object with a string under "text" or the named column.
    """
    if isinstance(text, bytes) or not has_documents(text.file, text.column):
        yield text
    elif is_table(text.file, text.column):
        yield from filter(None, row_texts(text.file, text.column, text.start, text.end))
    else:
        for number, line in enumerate(lines_of(text), start=1):
            if line.strip():
                yield _text_of(line, text.column or "text", f"{text.file}, line {number:,}")


def has_documents(file: Path, column: str = "") -> bool:
    """Whether a file is JSON lines or a table, whose lines or rows are documents."""
    return is_jsonl(file) or is_table(file, column)


def lines_of(text: Text) -> Iterator[bytes]:
    """The lines of a text, without their ends."""
    for part in parts(text, "line"):
        yield from part.removesuffix(b"\n").split(b"\n")


def _text_of(line: bytes, column: str, name: str) -> bytes:
    """The text of a JSON line, as UTF-8."""
    try:
        content = json.loads(line)
        text = content.get(column) if isinstance(content, dict) else content
        if isinstance(text, str):
            return text.encode()
        lists = any(isinstance(x, list) for x in (content.values() if isinstance(content, dict) else [content]))
        reason = "it has no text" + (", but a list. If that is of token ids, give --corpus.unit id" if lists else "")
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "") or str(error)
    raise Mistake(
        f'{name}, must be a JSON string or an object with a string "{column}": {reason}. Mend or remove it, or '
        "rename the field, or name it by --corpus.column in training."
    )


def chunks(text: Text, size: int = _PIECE) -> Iterator[bytes]:
    """The bytes of `text`, about `size` at a time."""
    if isinstance(text, bytes):
        yield from (text[start : start + size] for start in range(0, len(text), size))
        return
    with read_errors(text.file), open_file(text.file) as opened:
        position, end = text.start, sys.maxsize if text.end is None else text.end
        opened.seek(position)
        while chunk := opened.read(min(size, end - position)):
            yield chunk
            position += len(chunk)
            if text.file.suffix in OPENERS:
                check_unpacked(text.file, position)


def _last_border(text: bytearray, unit: Unit | Literal["line"], searched: int) -> int:
    """The last position at which `text`, which may continue, can be cut, as in `parts`; 0 if there is none.

    The first `searched` bytes were searched before and contain no such position.
    """
    if unit == "line":
        return text.rfind(b"\n", searched) + 1
    if unit == "word":
        return max(text.rfind(white, searched) for white in WHITE) + 1
    if unit == "bpe":
        return max(cuts(text), default=0)
    end = len(text)
    if unit == "char":
        while end > max(len(text) - 3, 0) and text[end - 1] & 0xC0 == 0x80:
            end -= 1
        end -= bool(end) and text[end - 1] >= 0xC0
    return end


def read_text(file: str) -> bytes:
    """The bytes of a file, or of standard input for "-"."""
    return sys.stdin.buffer.read() if file == "-" else read_file(Path(file))
