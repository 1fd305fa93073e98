"""`Corpus`: a folder of token ids on disk, memory-mapped, with a header that says what they are.

    corpus.json   format, what the text was, how it was tokenised, and per split: counts, SHA-256, document starts
    vocab.json    the vocabulary
    train.bin     raw little-endian ids of the smallest type that fits; valid.bin and test.bin alike

A store is written beside its place, synced and renamed, so that it is there whole or not at all.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from filelock import FileLock
from jaxtyping import Integer

from transformer_xl.data import bpe
from transformer_xl.data.counting import Counting, PairCounting, WordCounting
from transformer_xl.data.published import SPLITS
from transformer_xl.data.vocab import Newlines, Unit, Vocab
from transformer_xl.files import explained, remove_unfinished, whole_folder

_FORMAT = "transformer-xl token store"
_VERSION = 1
_PIECE = 1 << 18
"""Bytes of text at a time: what is made of them stays in the cache."""
_LONGEST = 1 << 12
"""How far before the end of a piece a place to cut it is looked for, in bytes."""
_WHITE = re.compile(rb"[ \n]")
Text = bytes | Path
"""A text in memory, or the file that holds it."""
OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
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
    partial: str = ""
    """What is missing of a published corpus, in words; empty: nothing."""
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

    @property
    def about(self) -> dict[str, str]:
        """What an entry of metrics says of the text its figures are over."""
        return {"corpus": self.name} | ({"partial": self.header.partial} if self.header.partial else {})

    @property
    def caveat(self) -> str:
        """What must stand beside every figure made from this corpus: what is missing of it; empty: nothing."""
        return f"; partial: {self.header.partial}" if self.header.partial else ""

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
        splits: Mapping[str, Text | Sequence[Text]],
        *,
        name: str = "",
        source: str = "",
        partial: str = "",
        unit: Unit = "byte",
        newlines: Newlines = "keep",
        vocab: Vocab | None = None,
        counted: Sequence[str] = ("train",),
        min_count: int = 1,
        closed: bool = False,
        bpe_size: int = 8192,
        documents: bool = False,
        reuse: bool = False,
        check: Callable[[Header], None] | None = None,
    ) -> Corpus:
        """Tokenise `splits` into a store in folder `path`, in place of one that is there, and open it.

        Args:
            splits: for each of train, valid, test that there is, its text (UTF-8 unless the unit is "byte") as bytes
                or as a file that is read piece by piece, or several in order.
            partial: what is missing of a published corpus, in words.
            vocab: use it, with its unit and newlines; None makes one from the splits in `counted` with `unit`,
                `newlines`, `min_count`, `closed` (see `Vocab.from_counts`) and `bpe_size`.
            documents: each text starts with a fresh memory; otherwise they are glued. A line of words ends with its
                text in any case.
            reuse: a sound store that is there already is opened instead.
            check: may raise against what was counted, before the store takes its place.

        `ValueError` for a split with fewer than 2 tokens or a symbol that `vocab` lacks, `OSError` where the
        store cannot be written.
        """
        path = Path(path)
        texts = {split: [text] if isinstance(text, bytes | Path) else list(text) for split, text in splits.items()}
        assert texts and set(texts) <= set(SPLITS), f"splits must be among {SPLITS}, got {tuple(texts)}"
        if vocab is None and not set(counted) & texts.keys():
            raise ValueError(
                f"{name or path.name} must have a {' or '.join(counted)} split to make a vocabulary from, got "
                f"{', '.join(texts)} only."
            )
        how = _Tokenising(unit, newlines, vocab, counted, min_count, closed, bpe_size, documents)
        about = {"name": name or path.name, "source": source, "partial": partial}
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_name(f".{path.name}.lock")):
                if reuse:
                    with suppress(FileNotFoundError, ValueError):
                        return cls.open(path)
                if path.exists() and not (path / "corpus.json").is_file() and (path.is_file() or any(path.iterdir())):
                    raise ValueError(
                        f"{path} holds something that is not a token store; name another folder, or empty it."
                    )
                remove_unfinished(path.parent, path.name)
                with whole_folder(path) as folder:
                    _write(folder, texts, how, about, check)
        return cls.open(path)


def open_file(path: Path) -> io.BufferedIOBase:
    """A file to read, decompressed where its name ends in .xz, .gz or .bz2."""
    return OPENERS.get(path.suffix, open)(path, "rb")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say which file could not be read, and why."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no file {path}.") from error
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a sound {path.suffix} file: {error}. Download it again.") from error
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(f"Cannot read {path}: {error.strerror or error}.") from error


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
    left, ends_line = b"", True
    for chunk in _chunks(text, size):
        ends_line = chunk.endswith(b"\n")
        left += chunk
        end = _last_border(left, unit)
        if end:
            yield left[:end]
            left = left[end:]
    if unit == "word" and not ends_line:
        left += b"\n"
    if left:
        yield left


def _chunks(text: Text, size: int) -> Iterator[bytes]:
    if isinstance(text, bytes):
        yield from (text[start : start + size] for start in range(0, len(text), size))
    else:
        with reading(text), open_file(text) as opened:
            yield from iter(lambda: opened.read(size), b"")


def _last_border(text: bytes, unit: Unit) -> int:
    """The last place where `text`, which may go on, can be cut without cutting a symbol; 0 if there is none."""
    if unit == "word":
        return max(text.rfind(b" "), text.rfind(b"\n")) + 1
    if unit == "bpe":
        place = bpe.border(text, max(len(text) - _LONGEST, 0))
        return place if place < len(text) else 0
    end = len(text)
    if unit == "char":
        while end and text[end - 1] & 0xC0 == 0x80:
            end -= 1
        end -= bool(end) and text[end - 1] >= 0xC0
    return end


def _write(
    folder: Path,
    texts: dict[str, list[Text]],
    how: _Tokenising,
    about: dict[str, str],
    check: Callable[[Header], None] | None,
) -> None:
    vocab, splits = _tokenise(folder, texts, how)
    for split, written in splits.items():
        if written.tokens < 2:
            raise ValueError(
                f"The {split} split of {about['name']} must have at least 2 tokens, for the first is context, and has "
                f"{written.tokens}. Give more text."
            )
    header = Header(
        **about,
        unit=vocab.unit,
        newlines=vocab.newlines,
        dtype=vocab.dtype.str,
        vocab_size=len(vocab),
        vocab=vocab.fingerprint,
        splits=splits,
    )
    if check:
        check(header)
    (folder / "vocab.json").write_text(json.dumps(vocab.to_json()) + "\n", encoding="utf-8")
    (folder / "corpus.json").write_text(json.dumps(header.to_json(), indent=1) + "\n", encoding="utf-8")


class _Tokenising(NamedTuple):
    """How `Corpus.build` was asked to make ids of texts."""

    unit: Unit
    newlines: Newlines
    vocab: Vocab | None
    counted: Sequence[str]
    min_count: int
    closed: bool
    bpe_size: int
    documents: bool

    def counting(self, texts: Sequence[Text]) -> Counting:
        """What makes a vocabulary of words or byte pairs while it numbers them."""
        if self.unit == "word":
            return WordCounting(self.newlines)
        return PairCounting(
            self.newlines, (piece.decode() for text in texts for piece in pieces(text, "bpe")), self.bpe_size
        )


def _tokenise(folder: Path, texts: dict[str, list[Text]], how: _Tokenising) -> tuple[Vocab, dict[str, SplitHeader]]:
    """Write the ids of every split; a vocabulary that is to be made is made from the splits that count."""
    vocab, written = how.vocab, {}
    counted = [split for split in how.counted if split in texts] if vocab is None else []
    every = [text for split in counted for text in texts[split]]
    if vocab is None and how.unit in ("byte", "char"):
        symbols = (piece for text in every for piece in pieces(text, how.unit))
        vocab = Vocab.build(how.unit, symbols, newlines=how.newlines, min_count=how.min_count, closed=how.closed)
    elif vocab is None:
        counting = how.counting(every)
        for split in counted:
            written[split] = _write_ids(
                folder / f"{split}.numbers", texts[split], how, lambda piece, _: counting.encode(piece)
            )
        vocab, ids_by_number = counting.vocab(min_count=how.min_count, closed=how.closed)
        for split in counted:
            _renumber(folder / f"{split}.numbers", folder / f"{split}.bin", ids_by_number)
    how = how._replace(unit=vocab.unit, newlines=vocab.newlines)
    for split in texts.keys() - written.keys():
        written[split] = _write_ids(
            folder / f"{split}.bin", texts[split], how, lambda piece, start: vocab.encode(piece, start=start)
        )
    return vocab, {split: _split_header(folder / f"{split}.bin", vocab, *written[split]) for split in texts}


def _write_ids(
    file: Path, texts: Sequence[Text], how: _Tokenising, encode: Callable[[bytes, int], np.ndarray]
) -> tuple[int, list[int] | None]:
    """Write what `encode` makes of each piece and its place; returns the size of the text and its documents' starts."""
    tokens, size, starts = 0, 0, []
    with file.open("wb") as out:
        for text in texts:
            begin = tokens
            for piece in pieces(text, how.unit):
                size += len(piece)
                opens = how.newlines == "sentence" and tokens == begin and (how.documents or begin == 0)
                ids = encode(b"\n" + piece if opens else piece, tokens - begin)
                out.write(ids.data)
                tokens += ids.size
            if tokens > begin:
                starts.append(begin)
    return size, starts if how.documents else None


def _renumber(numbers: Path, file: Path, ids_by_number: np.ndarray) -> None:
    with numbers.open("rb") as read, file.open("wb") as out:
        while piece := read.read(_PIECE):
            out.write(ids_by_number[np.frombuffer(piece, np.int32)].data)
    numbers.unlink()


def _split_header(file: Path, vocab: Vocab, size: int, documents: list[int] | None) -> SplitHeader:
    """What the header says of a split whose ids are written."""
    digest, counts = hashlib.sha256(), np.zeros(len(vocab), np.int64)
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            digest.update(piece)
            counts += np.bincount(np.frombuffer(piece, vocab.dtype), minlength=len(vocab))
    return SplitHeader(
        tokens=int(counts.sum()),
        types=int(np.count_nonzero(counts)),
        unknown=0 if vocab.unk is None else int(counts[vocab.unk]),
        bytes=size,
        sha256=digest.hexdigest(),
        documents=documents,
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
