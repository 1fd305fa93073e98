"""The header of a token store, `corpus.json`: its content, and how to read, check and write it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..mistake import Mistake, shortened
from ..runtime.files import read_table
from .vocab import Newlines, Unit

SPLITS = ("train", "valid", "test")
WHOLE = "all"
"""The only split of a text that is not cut. For a corpus with splits, all of them one after another."""
FORMAT = "transformer-xl token store"
VERSION = 3
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
    source: str
    """The origin of the text, in words."""
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
        with name_damage(path):
            if content.pop("seal", "") != _seal(content):
                raise ValueError("its content is not what was written")
            splits = {name: SplitHeader(**split) for name, split in content.pop("splits").items()}
            if not splits or not (splits.keys() <= {*SPLITS} or splits.keys() == {WHOLE}):
                raise ValueError("its splits have other names")  # they are names of files
            return cls(splits=splits, **content)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "seal": _seal(asdict(self)), **asdict(self)}


def _seal(content: dict[str, Any]) -> str:
    """SHA-256 of a header, by which damage is found."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def name_damage(path: Path) -> Iterator[None]:
    """Turn an error in a file of a token store into a sentence that names the file."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise Mistake(f"{path} is damaged: {shortened(str(error)).rstrip('.')}. {PREPARE_AGAIN}") from error
    except (TypeError, AttributeError, KeyError) as error:
        raise Mistake(f"{path} is damaged: an entry is missing or unknown. {PREPARE_AGAIN}") from error
