"""Any text as a corpus: files and folders read, told from binary, and cut into train, valid and test."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from transformer_xl.data.published import SPLITS
from transformer_xl.data.reading import border, read_file
from transformer_xl.data.vocab import Unit

_SPLIT_NAMES = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}


def read_splits(path: Path, unit: Unit, *, whole_files: bool = False) -> dict[str, list[bytes]]:
    """The texts of each split of a file or folder; empty files and hidden ones are left out.

    A file is cut 90 : 5 : 5 by position. So are the files of a folder, glued in the order of their names, unless they
    are named train, valid (or validation) and test, as in `ptb.train.txt`; with `whole_files` whole ones are held out.
    """
    files = [path] if not path.is_dir() else _visible_files(path)
    named: dict[str, list[Path]] = {}
    for file in files:
        parts = [_SPLIT_NAMES[part] for part in file.name.lower().split(".") if part in _SPLIT_NAMES]
        if path.is_dir() and file.parent == path and parts:
            named.setdefault(parts[0], []).append(file)
    if {"train", "valid"} <= named.keys() or (files and sum(map(len, named.values())) == len(files)):
        splits = {split: _read_texts(named[split], unit) for split in SPLITS if split in named}
    else:
        texts = _read_texts(files, unit)
        splits = _hold_out_files(path, texts) if whole_files else _cut(b"".join(texts), unit)
    for split, texts in splits.items():
        if not texts:
            raise ValueError(f"{path} has no text for the {split} split: it is empty or too short. Give more text.")
    return splits


def _visible_files(folder: Path) -> list[Path]:
    found = (file for file in folder.rglob("*") if file.is_file())
    return sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts))


def _read_texts(files: Sequence[Path], unit: Unit) -> list[bytes]:
    return [text for text in (_read_text(file, unit) for file in files) if text]


def _read_text(file: Path, unit: Unit) -> bytes:
    """One file, ready to be glued: a word never runs on into the next file."""
    text = read_file(file)
    if unit == "byte":
        return text
    units = "byte pairs" if unit == "bpe" else f"{unit}s"
    text = text.removeprefix(codecs.BOM_UTF8)
    try:
        text.decode("utf-8")
        broken = text.find(b"\0")
    except UnicodeDecodeError as error:
        broken = error.start
    if broken >= 0:
        raise ValueError(
            f"{file} must be UTF-8 text for a corpus of {units}, and is binary or in another encoding: byte {broken:,} "
            f'is 0x{text[broken]:02x}. Convert it, leave it out, or take corpus.unit = "byte".'
        )
    return text + b"\n" if unit == "word" and text and not text.endswith(b"\n") else text


def _cut(text: bytes, unit: Unit) -> dict[str, list[bytes]]:
    """90 : 5 : 5 by position; words are cut behind a line, unless lines are so long that the next part would suffer."""
    cuts = []
    for twentieths in (18, 19):
        position = len(text) * twentieths // 20
        line = text.find(b"\n", position) + 1 if unit == "word" else 0
        cuts.append(line if 0 < line <= position + len(text) // 40 else border(text, position, unit))
    valid, test = cuts
    parts = zip(SPLITS, (text[:valid], text[valid:test], text[test:]), strict=True)
    return {split: [part] if part else [] for split, part in parts}


def _hold_out_files(path: Path, texts: list[bytes]) -> dict[str, list[bytes]]:
    """The last whole texts that come to a twentieth of all for test, those before for validation; at least one each."""
    if len(texts) < 3:
        raise ValueError(
            f"corpus.reset_documents must be false for {path}, which holds {len(texts)} files with text: at least 3 "
            "are needed to hold whole ones out."
        )
    share = sum(map(len, texts)) / 20
    left, held_out = list(texts), []
    for keep in (2, 1):
        part = [left.pop()]
        while sum(map(len, part)) < share and len(left) > keep:
            part.insert(0, left.pop())
        held_out.append(part)
    return {"train": left, "valid": held_out[1], "test": held_out[0]}
