"""Texts that are made for the tables: a small one from Python's own library, and sentences in random order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..config.settings import CorpusConfig
from ..data.datasets import open_corpus
from ..data.library import library
from ..runtime.files import wait_for, whole_folder

BYTES = {"train": 1_500_000, "valid": 50_000, "test": 100_000}
"""Bytes of each split of the toy text, taken from the source of Python's library."""


def make_text(name: str, folder: Path, size: str) -> Path:
    """The folder with a text, made if it is missing.

    text: source of Python's library. sentences: Penn Treebank's in one random order within each split, so that only
    style carries over from line to line; for the toy size, lines of `text`.
    """
    toy = size == "toy"
    path = folder / ("lines" if toy and name == "sentences" else name)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with wait_for(folder / f".{path.name}.lock", f"writing {path}"):
        if path.exists():  # another process has written it
            return path
        with whole_folder(path) as new:
            for split, text in _library() if toy else _treebank():
                lines = text.splitlines(keepends=True)
                if name == "sentences":
                    lines = [lines[i] for i in np.random.default_rng(0).permutation(len(lines))]
                (new / f"{split}.txt").write_text("".join(lines), encoding="utf-8")
    return path


def _library() -> Iterator[tuple[str, str]]:
    """The first files of each split of Python's library."""
    for split, files in library().items():
        text = b"".join(files.values())[: BYTES[split]]
        yield split, text[: text.rfind(b"\n") + 1].decode(errors="replace")


def _treebank() -> Iterator[tuple[str, str]]:
    """The sentences of each split of Penn Treebank, one per line, which `txl data ptb` prepared."""
    corpus = open_corpus(CorpusConfig(name="ptb", unit="word"))
    for split in ("train", "valid", "test"):
        lines = corpus.vocab.decode(corpus.split(split).ids).splitlines()
        yield split, "".join(line.strip() + "\n" for line in lines)
