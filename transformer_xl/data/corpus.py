"""`Corpus`: a token store, which is a folder of token ids on disk, memory-mapped, with a header that describes them.

    corpus.json   format, origin of the text, how it was tokenised, and per split: counts, SHA-256, document starts
    vocab.json    the vocabulary
    train.bin     raw little-endian ids of the smallest type that fits; valid.bin and test.bin likewise

A store is written under another name, synced and renamed, so it is there whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from filelock import FileLock
from jaxtyping import Int, Integer

from ..mistake import Mistake
from ..runtime.files import digest_of, explain_write_error, remove_unfinished, whole_folder
from .header import PREPARE_AGAIN, SPLITS, WHOLE, Header, SplitHeader, name_damage, read_table
from .numbering import Numbering, PairNumbering, WordNumbering
from .reading import Text, pieces
from .vocab import Newlines, Unit, Vocab

_IDS = 1 << 20
"""Bytes of ids read at a time: enough to make counting cheap, few enough for the processor's cache."""

_LONG_WORDS = 30
"""More bytes per word than in any language with spaces: 6 in English, 14 in Russian, 28 in Malayalam."""


class Split(NamedTuple):
    """The ids of one split of a corpus."""

    ids: Integer[np.ndarray, " N"]
    documents: Integer[np.ndarray, " D"] | None
    """Positions at which documents start, the first 0, if each document starts with an empty memory."""
    name: str


@dataclass(frozen=True)
class Corpus:
    """A token store: its header and vocabulary in memory, its ids on disk."""

    path: Path
    header: Header
    vocab: Vocab
    other_ids: Integer[np.ndarray, " V"] | None = field(default=None, compare=False)
    """The id in `vocab` of each id on disk, if they differ."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Sentences for people about how a text became splits."""
    _verified: set[str] = field(default_factory=set, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.header.name

    @property
    def unit(self) -> Unit:
        return self.header.unit

    @property
    def about(self) -> dict[str, str]:
        """The entries that name this text beside figures in metrics."""
        return {"corpus": self.name} | ({"partial": self.header.partial} if self.header.partial else {})

    @property
    def caveat(self) -> str:
        """The note beside every figure made from this corpus: what is missing from it; empty if it is whole."""
        return f"; partial: {self.header.partial}" if self.header.partial else ""

    @property
    def caution(self) -> str:
        """A warning that words do not suit the text; empty if they do."""
        splits = self.header.splits.values()
        size = sum(split.bytes for split in splits) / sum(split.tokens for split in splits)
        if self.unit != "word" or size < _LONG_WORDS:
            return ""
        return (
            f"{self.name} has {size:.0f} bytes for each word, as a text without spaces between words has: "
            "--corpus.unit char or bpe suits it."
        )

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = False) -> Corpus:
        """Open the store in folder `path` and compare its files with its header.

        `verify` also compares the SHA-256 of the ids of every split; `split` does so for the split it returns.

        Raises:
            FileNotFoundError: there is no store.
            ValueError: it is damaged.
        """
        path = Path(path)
        header = Header.read(path / "corpus.json")
        stored = read_table(path / "vocab.json")
        with name_damage(path / "vocab.json"):
            vocab = Vocab.from_json(stored)
        theirs = (vocab.fingerprint, len(vocab), vocab.dtype.str, vocab.unit, vocab.newlines)
        if theirs != (header.vocab, header.vocab_size, header.dtype, header.unit, header.newlines):
            raise Mistake(f"{path / 'vocab.json'} is not the vocabulary its corpus.json names. {PREPARE_AGAIN}")
        for name, split in header.splits.items():
            file = path / f"{name}.bin"
            size, expected = file.stat().st_size if file.is_file() else 0, split.tokens * vocab.dtype.itemsize
            if size != expected:
                raise Mistake(f"{file} has {size:,} bytes, but its header says {expected:,}. {PREPARE_AGAIN}")
        corpus = cls(path, header, vocab)
        for name in header.splits if verify else ():
            corpus._verify(name)
        return corpus

    def _verify(self, name: str) -> None:
        """Compare a split's ids with its header and the vocabulary; only once, because this reads all of them."""
        if name in self._verified:
            return
        file = self.path / f"{name}.bin"
        if digest_of(file) != self.header.splits[name].sha256:
            raise Mistake(f"{file} does not have the SHA-256 its header says. {PREPARE_AGAIN}")
        if (highest := int(np.memmap(file, self.header.dtype, "r").max())) >= self.header.vocab_size:
            raise Mistake(f"{file} has the id {highest:,}, outside of its vocabulary. {PREPARE_AGAIN}")
        self._verified.add(name)

    def split(self, name: Literal["train", "valid", "test", "all"]) -> Split:
        """One split, or for "all" the splits one after another. The first call reads all ids to verify them.

        The ids are memory-mapped, or in memory if `in_vocabulary` or "all" changed them.

        Raises:
            ValueError: the corpus lacks this split, or its ids are damaged.
        """
        if name == WHOLE and WHOLE not in self.header.splits:
            splits = [self.split(split) for split in SPLITS if split in self.header.splits]
            starts = np.cumsum([0, *(len(split.ids) for split in splits[:-1])])
            pairs = zip(splits, starts, strict=True)
            documents = [split.documents + start for split, start in pairs if split.documents is not None]
            ids = np.concatenate([split.ids for split in splits])
            return Split(ids, np.concatenate(documents) if documents else None, name)
        if name not in self.header.splits:
            raise Mistake(
                f"The corpus {self.name} has no {name} split, only {', '.join(self.header.splits)}. "
                + (
                    "It was left whole: name another split by --split, and it is cut."
                    if WHOLE in self.header.splits
                    else "Ask for another."
                    if self.name in self.path.parts
                    else f"Put a file {name}.txt beside the others, or ask for another."
                )
            )
        starts = self.header.splits[name].documents
        self._verify(name)
        ids = np.memmap(self.path / f"{name}.bin", dtype=self.header.dtype, mode="r")
        ids = ids if self.other_ids is None else self.other_ids[ids]
        return Split(ids, None if starts is None else np.array(starts, np.int64), name)

    def unknown(self, name: str) -> int:
        """Number of tokens of a split, or of "all", that are `<unk>`."""
        splits = self.header.splits
        return splits[name].unknown if name in splits else sum(split.unknown for split in splits.values())

    def in_vocabulary(self, vocab: Vocab) -> Corpus:
        """The same text in a vocabulary that has the same tokens in another order.

        Raises:
            ValueError: `vocab` has other tokens.
        """
        if (vocab.unit, vocab.newlines) != (self.unit, self.header.newlines) or set(vocab.symbols) != set(
            self.vocab.symbols
        ):
            raise Mistake(
                f"The model's vocabulary ({vocab}) is not that of the corpus {self.name} ({self.vocab}). Use a corpus "
                "prepared as for its training, or give plain text, which is then tokenised with the model's vocabulary."
            )
        new_ids = {token: i for i, token in enumerate(vocab.symbols)}
        ids = np.array([new_ids[token] for token in self.vocab.symbols], vocab.dtype)
        return replace(self, vocab=vocab, other_ids=ids if self.other_ids is None else ids[self.other_ids])

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
        """Tokenise `splits` into a store in folder `path`, replacing a store that is there, and open it.

        Args:
            splits: the text, or several texts in order, of train, valid and test, or of those that exist. A text is
                bytes or a file that is read piece by piece, in UTF-8 unless the unit is "byte".
            partial: what is missing from a published corpus, in words.
            vocab: the vocabulary, which also sets the unit and newlines; None makes one from the splits in `counted`
                with `unit`, `newlines`, `min_count`, `closed` (see `Vocab.from_counts`) and `bpe_size`.
            documents: each text starts with an empty memory; otherwise texts are joined. A line of words always ends
                with its text.
            reuse: open the store that is there instead, if it is sound.
            check: called with the counts before the store gets its name; may raise.

        Raises:
            ValueError: a split has fewer than 2 tokens, or a token that `vocab` lacks.
            OSError: the store cannot be written.
        """
        path = Path(path)
        texts = {name: [text] if isinstance(text, Text) else list(text) for name, text in splits.items()}
        assert texts and (set(texts) <= set(SPLITS) or set(texts) == {WHOLE}), f"no splits: {tuple(texts)}"
        if vocab is None and not set(counted) & texts.keys():
            raise Mistake(
                f"{name or path.name} must have a {' or '.join(counted)} split to make a vocabulary from, got "
                f"{', '.join(texts)} only."
            )
        how = _Tokenising(unit, newlines, vocab, counted, min_count, closed, bpe_size, documents)
        about = {"name": name or path.name, "source": source, "partial": partial}
        with explain_write_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_name(f".{path.name}.lock")):
                if reuse:
                    with suppress(FileNotFoundError, ValueError):
                        return cls.open(path, verify=True)
                if path.exists() and not (path / "corpus.json").is_file() and (path.is_file() or any(path.iterdir())):
                    raise Mistake(
                        f"{path} holds something that is not a token store; name another folder, or empty it."
                    )
                remove_unfinished(path.parent, path.name)
                with whole_folder(path) as folder:
                    _write(folder, texts, how, about, check)
        return cls.open(path)


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
            raise Mistake(
                f"The {split} split of {about['name']} must have at least 2 tokens, because the first is context, "
                f"and has {written.tokens}. Give more text."
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
    """How to make ids of texts: arguments of `Corpus.build`."""

    unit: Unit
    newlines: Newlines
    vocab: Vocab | None
    counted: Sequence[str]
    min_count: int
    closed: bool
    bpe_size: int
    documents: bool

    def numbering(self, texts: Sequence[Text]) -> Numbering:
        """The numbering of words or byte pairs."""
        if self.unit == "word":
            return WordNumbering(self.newlines)
        parts = (piece.decode() for text in texts for piece in pieces(text, "bpe"))
        return PairNumbering(self.newlines, parts, self.bpe_size)


def _tokenise(folder: Path, texts: dict[str, list[Text]], how: _Tokenising) -> tuple[Vocab, dict[str, SplitHeader]]:
    """Write the ids of every split, and make the vocabulary from the counted splits unless it is given."""
    vocab, written = how.vocab, {}
    counted = [split for split in how.counted if split in texts] if vocab is None else []
    every = [text for split in counted for text in texts[split]]
    if vocab is None and how.unit in ("byte", "char"):
        parts = (piece for text in every for piece in pieces(text, how.unit))
        vocab = Vocab.build(how.unit, parts, newlines=how.newlines, min_count=how.min_count, closed=how.closed)
    elif vocab is None:
        numbering, counts = how.numbering(every), np.zeros(0, np.int64)
        for split in counted:
            file = folder / f"{split}.numbers"
            written[split] = _write_ids(file, texts[split], how, lambda piece, _: numbering.encode(piece))
            counts = _count_ids(file, np.dtype(np.int32), counts)
        vocab, ids_by_number = numbering.vocab(counts, min_count=how.min_count, closed=how.closed)
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
    """Write the ids that `encode` gives for each piece and its position; return the text's size and document starts."""
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
    with file.open("wb") as out:
        for ids in _blocks(numbers, np.dtype(np.int32)):
            out.write(ids_by_number[ids].data)
    numbers.unlink()


def _count_ids(file: Path, dtype: np.dtype[Any], before: Int[np.ndarray, " N"]) -> Int[np.ndarray, " M"]:
    """How often each id is in the file, added to the counts `before`."""
    for ids in _blocks(file, dtype):
        counts = np.bincount(ids, minlength=len(before))
        counts[: len(before)] += before
        before = counts
    return before


def _blocks(file: Path, dtype: np.dtype[Any]) -> Iterator[Integer[np.ndarray, " n"]]:
    """The ids in a file, a block at a time."""
    with file.open("rb") as opened:
        while block := opened.read(_IDS):
            yield np.frombuffer(block, dtype)


def _split_header(file: Path, vocab: Vocab, size: int, documents: list[int] | None) -> SplitHeader:
    """The header's entry for a split whose ids are written."""
    counts = _count_ids(file, vocab.dtype, np.zeros(len(vocab), np.int64))
    return SplitHeader(
        tokens=int(counts.sum()),
        types=int(np.count_nonzero(counts)),
        unknown=0 if vocab.unk is None else int(counts[vocab.unk]),
        bytes=size,
        sha256=digest_of(file),
        documents=documents,
    )
