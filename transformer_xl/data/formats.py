"""Refuse files that are no text, by what they hold and what lies beside them."""

from __future__ import annotations

import re
from pathlib import Path

from ..mistake import Mistake
from .reading import open_file, read_errors

_FORMATS: dict[bytes, str] = {
    b"PAR1": "a Parquet file, which needs the suffix .parquet",
    b"ARROW1": "an Arrow file, which needs the suffix .arrow",
    b"\x93NUMPY": 'a NumPy file, which corpus.unit = "id" reads',
    b"\x89HDF\r\n": "an HDF5 file",
    b"SQLite format 3\0": "an SQLite database",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x89PNG\r\n": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF-": "a PDF document",
    b"GGUF": "a GGUF model",
}
"""Formats whose content is not their bytes, by their first bytes."""
_TOKENS = re.compile(rb'\s*\{\s*"(?:ids|input_ids|tokens)"\s*:\s*\[')


def container_of(file: Path) -> str:
    """What a file is whose bytes are a container's, not a text's, in words; "" for any other."""
    with read_errors(file), open_file(file) as opened:
        head = opened.read(64)
    if file.suffix in (".pkl", ".pickle", ".pt", ".pth") and head.startswith((b"\x80", b"PK")):
        return "a pickle, which stays closed"
    if file.suffix == ".json" and _TOKENS.match(head):
        return 'a file of token ids, as MidiTok writes them, which corpus.unit = "id" reads'
    return next((kind for magic, kind in _FORMATS.items() if head.startswith(magic)), "")


def refuse_container(file: Path) -> None:
    """Refuse to read a container as text."""
    if kind := container_of(file):
        raise Mistake(f"{file} must be text, and is {kind}. Write its text as .txt, or as JSON lines (.jsonl).")
