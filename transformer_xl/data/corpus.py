"""`Corpus`: a folder of token ids on disk, memory-mapped, with a header that says what they are.

    corpus.json   format, what the text was, how it was tokenised, and per split: counts, SHA-256, document starts
    vocab.json    the vocabulary
    train.bin     raw little-endian ids of the smallest type that fits; valid.bin and test.bin alike

A store is written beside its place, synced and renamed, so that it is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from filelock import FileLock
from jaxtyping import Integer

from transformer_xl.data.vocab import Newlines, Unit, Vocab

SPLITS = ("train", "valid", "test")
_FORMAT = "transformer-xl token store"
_VERSION = 1
_PIECE = 1 << 22
_WHITE = re.compile(rb"[ \n]")
_PREPARE_AGAIN = "Delete that folder and prepare the corpus again."


class Split(NamedTuple):
    """One part of a corpus."""

    ids: Integer[np.ndarray, " N"]
    documents: Integer[np.ndarray, " D"] | None
    """Where documents start, if each is to start with a fresh memory; the first at 0."""
    name: str


@dataclass(frozen=True, kw_only=True)
class SplitHeader:
    """What a token store says about one split."""

    tokens: int
    types: int
    """Distinct ids that occur."""
    unknown: int
    """Tokens that are `<unk>`."""
    bytes: int
    """Size of the source text, line ends included even where they are dropped."""
    sha256: str
    documents: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a token store says about itself."""

    name: str
    source: str
    """Where the text came from, in words."""
    unit: Unit
    newlines: Newlines
    dtype: str
    vocab_size: int
    vocab: str
    """Fingerprint of the vocabulary the ids belong to."""
    splits: dict[str, SplitHeader]

    @classmethod
    def read(cls, path: Path) -> Header:
        """Read `corpus.json`; `FileNotFoundError` or `ValueError` say what is wrong with it."""
        content = _read_json(path)
        if content.pop("format", None) != _FORMAT or content.pop("version", None) != _VERSION:
            raise ValueError(
                f"{path} is not a {_FORMAT} of version {_VERSION}, the one this release reads. {_PREPARE_AGAIN}"
            )
        try:
            splits = {name: SplitHeader(**split) for name, split in content.pop("splits").items()}
            return cls(splits=splits, **content)
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{path} is damaged: {error}. {_PREPARE_AGAIN}") from error

    def to_json(self) -> dict[str, Any]:
        return {"format": _FORMAT, "version": _VERSION, **asdict(self)}


@dataclass(frozen=True)
class Corpus:
    """A token store: its header and vocabulary in memory, its ids on disk."""

    path: Path
    header: Header
    vocab: Vocab

    @property
    def name(self) -> str:
        return self.header.name

    @property
    def unit(self) -> Unit:
        return self.header.unit

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = False) -> Corpus:
        """Open the store in folder `path` and hold its files against its header.

        `verify` also compares the SHA-256 of the ids, which reads them all. `FileNotFoundError` where there is no
        store, `ValueError` where it is damaged.
        """
        path = Path(path)
        header = Header.read(path / "corpus.json")
        vocab = Vocab.from_json(_read_json(path / "vocab.json"))
        if (vocab.fingerprint, len(vocab), vocab.dtype.str) != (header.vocab, header.vocab_size, header.dtype):
            raise ValueError(f"{path / 'vocab.json'} is not the vocabulary its corpus.json names. {_PREPARE_AGAIN}")
        for name, split in header.splits.items():
            file = path / f"{name}.bin"
            size, expected = file.stat().st_size if file.is_file() else 0, split.tokens * vocab.dtype.itemsize
            if size != expected:
                raise ValueError(f"{file} has {size:,} bytes, but its header says {expected:,}. {_PREPARE_AGAIN}")
            if verify and _sha256(file) != split.sha256:
                raise ValueError(f"{file} does not have the SHA-256 its header says. {_PREPARE_AGAIN}")
        return cls(path, header, vocab)

    def split(self, name: Literal["train", "valid", "test"]) -> Split:
        """One split, its ids memory-mapped; `ValueError` where the corpus lacks it."""
        if name not in self.header.splits:
            raise ValueError(
                f"The corpus {self.name} has no {name} split, only {', '.join(self.header.splits)}. "
                f"Put a file {name}.txt beside the others, or ask for another split."
            )
        starts = self.header.splits[name].documents
        ids = np.memmap(self.path / f"{name}.bin", dtype=self.header.dtype, mode="r")
        return Split(ids, None if starts is None else np.array(starts, np.int64), name)

    @classmethod
    def build(
        cls,
        path: str | Path,
        splits: Mapping[str, bytes | Sequence[bytes]],
        *,
        name: str = "",
        source: str = "",
        unit: Unit = "byte",
        newlines: Newlines = "keep",
        min_count: int = 1,
        vocab: Vocab | None = None,
        documents: bool = False,
        reuse: bool = False,
    ) -> Corpus:
        """Tokenise `splits` into a store in folder `path`, in place of one that is there, and open it.

        Args:
            splits: for each of train, valid, test that there is, its text as bytes (UTF-8 unless the unit is
                "byte"), or several texts in order.
            vocab: use it, with its unit and newlines; None builds one from the training split with `unit`,
                `newlines` and `min_count`.
            documents: each text starts with a fresh memory; otherwise they are glued. A line of words ends with its
                text in any case.
            reuse: a sound store that is there already is opened instead.

        `ValueError` for a split with fewer than 2 tokens or a symbol that `vocab` lacks, `OSError` where the
        store cannot be written.
        """
        path = Path(path)
        texts = {split: [text] if isinstance(text, bytes) else list(text) for split, text in splits.items()}
        assert texts and set(texts) <= set(SPLITS), f"splits must be among {SPLITS}, got {tuple(texts)}"
        if vocab is None and "train" not in texts:
            raise ValueError(
                f"{name or path.name} must have a train split to make a vocabulary from, got {', '.join(texts)} only."
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_name(f".{path.name}.lock")):
                if reuse:
                    with suppress(FileNotFoundError, ValueError):
                        return cls.open(path)
                if vocab is None:
                    pieces = (piece for text in texts["train"] for piece in _pieces(text, unit))
                    vocab = Vocab.build(unit, pieces, newlines=newlines, min_count=min_count)
                _write(path, texts, vocab, name=name or path.name, source=source, documents=documents)
        except OSError as error:
            raise OSError(
                f"Cannot write the token store {path}: {error.strerror or error}. "
                "Make room there, or set TXL_HOME to a folder that has it."
            ) from error
        return cls.open(path)


def closed_vocab(unit: Unit, texts: Sequence[bytes], *, newlines: Newlines) -> Vocab:
    """The closed vocabulary of exactly the symbols in `texts`, as a published protocol has it."""
    pieces = (piece for text in texts for piece in _pieces(text, unit))
    return Vocab.build(unit, pieces, newlines=newlines, closed=True)


def border(text: bytes, position: int, unit: Unit) -> int:
    """The first place from `position` on where `text` can be cut without cutting a symbol."""
    if unit == "word":
        white = _WHITE.search(text, position)
        return white.end() if white else len(text)
    if unit == "char":
        while position < len(text) and text[position] & 0xC0 == 0x80:
            position += 1
    return min(position, len(text))


def _pieces(text: bytes, unit: Unit, size: int = _PIECE) -> Iterator[str | bytes]:
    """`text` in pieces whose symbols are the symbols of the whole, so that memory stays small."""
    start = 0
    while start < len(text):
        end = border(text, start + size, unit)
        yield text[start:end] if unit == "byte" else text[start:end].decode("utf-8")
        start = end
    if unit == "word" and text and not text.endswith(b"\n"):
        yield "\n"


def _write(path: Path, texts: dict[str, list[bytes]], vocab: Vocab, *, name: str, source: str, documents: bool) -> None:
    if path.exists() and not (path / "corpus.json").is_file() and (path.is_file() or any(path.iterdir())):
        raise ValueError(f"{path} holds something that is not a token store; name another folder, or empty it.")
    beside, old = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    beside.mkdir()
    try:
        splits = {split: _write_split(beside / f"{split}.bin", text, vocab, documents) for split, text in texts.items()}
        for split, written in splits.items():
            if written.tokens < 2:
                raise ValueError(
                    f"The {split} split of {name} must have at least 2 tokens, for the first is context, and has "
                    f"{written.tokens}. Give more text."
                )
        header = Header(
            name=name,
            source=source,
            unit=vocab.unit,
            newlines=vocab.newlines,
            dtype=vocab.dtype.str,
            vocab_size=len(vocab),
            vocab=vocab.fingerprint,
            splits=splits,
        )
        (beside / "vocab.json").write_text(json.dumps(vocab.to_json()) + "\n", encoding="utf-8")
        (beside / "corpus.json").write_text(json.dumps(header.to_json(), indent=1) + "\n", encoding="utf-8")
        for item in (*beside.iterdir(), beside):
            _sync(item)
        if path.exists():
            path.rename(old)
        beside.rename(path)
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_split(file: Path, texts: list[bytes], vocab: Vocab, documents: bool) -> SplitHeader:
    digest, counts = hashlib.sha256(), np.zeros(len(vocab), np.int64)
    tokens, starts = 0, []
    with file.open("wb") as out:
        for text in texts:
            begin = tokens
            for piece in _pieces(text, vocab.unit):
                ids = vocab.encode(piece, start=tokens - begin)
                counts += np.bincount(ids, minlength=len(vocab))
                digest.update(ids.data)
                out.write(ids.data)
                tokens += ids.size
            if tokens > begin:
                starts.append(begin)
    return SplitHeader(
        tokens=tokens,
        types=int(np.count_nonzero(counts)),
        unknown=0 if vocab.unk is None else int(counts[vocab.unk]),
        bytes=sum(map(len, texts)),
        sha256=digest.hexdigest(),
        documents=starts if documents else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no token store at {path.parent}: {path.name} is missing.") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. {_PREPARE_AGAIN}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it must hold a table. {_PREPARE_AGAIN}")
    return content


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
