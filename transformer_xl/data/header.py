"""The header of a token store, `corpus.json`: its content, and how to read, check and write it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..mistake import Mistake
from ..runtime.files import digest_of_json, read_table
from .vocab import Newlines, Unit

SPLITS = ("train", "valid", "test")
WHOLE = "all"
"""The only split of a text that is not cut. For a corpus with splits, all of them one after another."""
FORMAT = "transformer-xl token store"
VERSION = 4
PREPARE_AGAIN = "Delete that folder and prepare the corpus again."


@dataclass(frozen=True, kw_only=True)
class SplitHeader:
    """The entry of one split."""

    tokens: int
    types: int
    """Number of different ids that occur."""
    unknown: int
    """Number of tokens that are `<unk>`."""
    bytes: int
    """Size of the source text, including line ends that were dropped."""
    sha256: str
    documents: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Header:
    """The facts in a token store about its text, tokens and splits."""

    name: str
    unit: Unit
    newlines: Newlines
    dtype: str
    vocab_size: int
    vocab: str
    """Fingerprint of the vocabulary."""
    splits: dict[str, SplitHeader]

    @classmethod
    def read(cls, path: Path) -> Header:
        """Read and check `corpus.json`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, or of another format or version.
        """
        if not path.exists():
            raise FileNotFoundError(f"There is no token store at {path.parent}: {path.name} is missing.")
        content = read_table(path, PREPARE_AGAIN)
        if content.pop("format", None) != FORMAT or content.pop("version", None) != VERSION:
            raise Mistake(f"{path} is not a {FORMAT} of version {VERSION}, the one this release reads. {PREPARE_AGAIN}")
        if content.pop("seal", "") != digest_of_json(content):
            raise Mistake(f"{path} is damaged: its content is not what was written. {PREPARE_AGAIN}")
        splits = {name: SplitHeader(**split) for name, split in content.pop("splits").items()}
        if not (splits.keys() <= {*SPLITS} or splits.keys() == {WHOLE}):  # they are names of files
            raise Mistake(f"{path} is damaged: its splits have other names. {PREPARE_AGAIN}")
        return cls(splits=splits, **content)

    def to_json(self) -> dict[str, Any]:
        content = vars(self) | {"splits": {name: {**vars(split)} for name, split in self.splits.items()}}
        return {"format": FORMAT, "version": VERSION, "seal": digest_of_json(content), **content}
