"""`Corpus`: a token store, a folder with memory-mapped token ids and a header that describes them.

    corpus.json   format, name of the text, how it was tokenised, and per split: counts, SHA-256, document starts
    vocab.json    the vocabulary
    train.bin     raw little-endian ids of the smallest type that fits; valid.bin and test.bin likewise

A store is written under another name, synced and renamed, so it exists only if it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer

from ..config.settings import CorpusConfig, Newlines, Part, Unit
from ..mistake import Mistake
from ..runtime import files
from .ids import document_starts, id_blocks, read_ids
from .reading import Span, Text, documents, pieces
from .subwords import renumber, train_bpe
from .vocab import Vocab

SPLITS = ("train", "valid", "test")
WHOLE = "all"
"""The only split of a text that is not cut. For a corpus with splits, all of them one after another."""
VOCABULARY, COUNTED = "entries of the vocabulary", ("tokens", "types", "unknown")
"""What `Header.counts` counts, once and in each split."""
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
        content = files.read_table(path, PREPARE_AGAIN)
        if content.pop("format", None) != FORMAT or content.pop("version", None) != VERSION:
            raise Mistake(f"{path} is not a {FORMAT} of version {VERSION}, the one this release reads. {PREPARE_AGAIN}")
        if content.pop("seal", "") != files.digest_of_json(content):
            raise Mistake(f"{path} is damaged: its content is not what was written. {PREPARE_AGAIN}")
        splits = {name: SplitHeader(**split) for name, split in content.pop("splits").items()}
        if not (splits.keys() <= {*SPLITS} or splits.keys() == {WHOLE}):  # they are names of files
            raise Mistake(f"{path} is damaged: its splits have other names. {PREPARE_AGAIN}")
        return cls(splits=splits, **content)

    @property
    def counts(self) -> dict[str, int]:
        """The counts by which a corpus is compared with the published one."""
        own = {f"{what} in {name}": vars(split)[what] for name, split in self.splits.items() for what in COUNTED}
        return {VOCABULARY: self.vocab_size, **own}

    def to_json(self) -> dict[str, Any]:
        content = vars(self) | {"splits": {name: {**vars(split)} for name, split in self.splits.items()}}
        return {"format": FORMAT, "version": VERSION, "seal": files.digest_of_json(content), **content}


class Split(NamedTuple):
    """The ids of one split of a corpus."""

    ids: Integer[np.ndarray, " N"]
    documents: Integer[np.ndarray, " D"] | None
    """Start positions of documents, the first 0; None unless each document starts with an empty memory."""
    name: str
    corpus: str = ""
    unknown: int = 0
    """Number of tokens that are `<unk>`."""

    def starts(self, document_end: int | None) -> Integer[np.ndarray, " D"]:
        """Where a model with this `document_end` reads without a past, the first 0: each such token begins a document,
        too."""
        own = np.zeros(1, np.int64) if self.documents is None else self.documents
        return own if document_end is None else np.union1d(own, np.flatnonzero(np.asarray(self.ids) == document_end))

    @property
    def title(self) -> str:
        return f"{self.corpus}, {self.name}{f' ({self.unknown:,} unknown)' if self.unknown else ''}"

    @property
    def about(self) -> dict[str, str]:
        """The entries that name this text in JSON and in metrics."""
        return {"corpus": self.corpus, "split": self.name}


@dataclass(frozen=True)
class Corpus:
    """A token store: its header and vocabulary in memory, its ids on disk."""

    path: Path
    header: Header
    vocab: Vocab
    other_ids: Integer[np.ndarray, " V"] | None = field(default=None, compare=False)
    """For each id on disk, the id in `vocab`; None if they are equal."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Sentences for the user about how a text was divided into splits."""
    _mapped: dict[Path, np.memmap] = field(default_factory=dict, compare=False, repr=False)
    """The verified ids of each file that was read. They stay readable if someone removes the store."""

    @property
    def name(self) -> str:
        return self.header.name

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_mapped": {}}  # a pickle would hold all ids

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Open the store in folder `path`, whose vocabulary and sizes of files must be those of its header. `split`
        compares the ids.

        Raises:
            FileNotFoundError: there is no store.
            ValueError: it is damaged.
        """
        path = Path(path)
        header = Header.read(path / "corpus.json")
        stored = files.read_table(path / "vocab.json", PREPARE_AGAIN)
        if files.digest_of_json(stored) != header.vocab:
            raise Mistake(f"{path / 'vocab.json'} is not the vocabulary its corpus.json names. {PREPARE_AGAIN}")
        vocab = Vocab.from_json(stored)
        for name, split in header.splits.items():
            file = path / f"{name}.bin"
            size, expected = file.stat().st_size if file.is_file() else 0, split.tokens * vocab.dtype.itemsize
            if size != expected:
                raise Mistake(f"{file} has {size:,} bytes, but its header says {expected:,}. {PREPARE_AGAIN}")
        return cls(path, header, vocab)

    @classmethod
    def _if_sound(cls, path: Path) -> Corpus | None:
        with suppress(FileNotFoundError, ValueError):
            corpus = cls.open(path)
            for name in (*SPLITS, WHOLE):
                if name in corpus.header.splits:
                    corpus.split(name)
            return corpus
        return None

    def split(self, name: Part) -> Split:
        """One split; for "all", the splits one after another. The first call reads all ids to verify them.

        The ids are memory-mapped; after `in_vocabulary`, and for "all", they are in memory.

        Raises:
            ValueError: the corpus lacks this split, or its ids are damaged.
        """
        if name == WHOLE and WHOLE not in self.header.splits:
            splits = [self.split(split) for split in SPLITS if split in self.header.splits]
            starts = np.cumsum([0, *(len(split.ids) for split in splits[:-1])])
            pairs = zip(splits, starts, strict=True)
            documents = [split.documents + start for split, start in pairs if split.documents is not None]
            ids = np.concatenate([split.ids for split in splits])
            unknown = sum(split.unknown for split in splits)
            return Split(ids, np.concatenate(documents) if documents else None, name, self.name, unknown)
        if name not in self.header.splits:
            raise Mistake(
                f"The corpus {self.name} has no {name} split, only {', '.join(self.header.splits)}. Ask for another, "
                f"or put a file {name}.txt beside the others of a text."
            )
        file, split = self.path / f"{name}.bin", self.header.splits[name]
        if file not in self._mapped:
            if files.digest_of(file) != split.sha256:
                raise Mistake(f"{file} does not have the SHA-256 its header says. {PREPARE_AGAIN}")
            self._mapped[file] = np.memmap(file, dtype=self.header.dtype, mode="r")
        ids = self._mapped[file]
        ids = ids if self.other_ids is None else self.other_ids[ids]
        starts = None if split.documents is None else np.array(split.documents, np.int64)
        return Split(ids, starts, name, self.name, split.unknown)

    def in_vocabulary(self, vocab: Vocab) -> Corpus:
        """The same text in a vocabulary with the same tokens in another order.

        Raises:
            ValueError: `vocab` has other tokens.
        """
        own, other = ((each.unit, each.newlines, {*each.symbols}) for each in (self.vocab, vocab))
        if own != other:
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
        config: CorpusConfig | None = None,
        *,
        name: str = "",
        vocab: Vocab | None = None,
        documents: bool = False,
        reuse: bool = False,
        check: Callable[[Header], None] | None = None,
    ) -> Corpus:
        """Tokenise `splits` into a store in folder `path`, and open it. This replaces an existing store.

        Args:
            splits: for train, valid and test, or some of them: a text, or several texts in order. A text is bytes or a
                file that is read in pieces. It is UTF-8 unless the unit is "byte"; for "id" it is a `Span` of ids.
            config: how to make a vocabulary, and the `document_end` that it must have. None: bytes.
            vocab: the vocabulary, which also sets the unit and newlines; ids need one. None makes one from the training
                split, or all of a text without splits.
            documents: each text, or line of a `.jsonl` file, starts with an empty memory. With a `document_end`, it is
                added after each, and they are joined. Otherwise texts are joined. For words, the end of a text always
                ends a line.
            reuse: if there is a sound store, open it instead.
            check: called with the header before the store gets its name; it may raise an error.

        Raises:
            ValueError: a split has fewer than 2 tokens, or a token that is not in `vocab`.
            OSError: the store cannot be written.
        """
        path = Path(path)
        name, config = name or path.name, config or CorpusConfig()
        texts = {split: [text] if isinstance(text, Text) else list(text) for split, text in splits.items()}
        assert texts and (set(texts) <= set(SPLITS) or set(texts) == {WHOLE}), f"no splits: {tuple(texts)}"
        counted = texts.get("train", texts.get(WHOLE, []))
        if vocab is None and not counted:
            raise Mistake(f"{name} must have a train split to make a vocabulary from, got {', '.join(texts)} only.")
        if reuse and (found := cls._if_sound(path)):
            return found  # also where nothing may be written
        with files.explain_write_error(path), files.wait_for(path.with_name(f".{path.name}.lock"), f"making {path}"):
            if reuse and (found := cls._if_sound(path)):
                return found
            if path.exists() and not (path / "corpus.json").is_file() and (path.is_file() or any(path.iterdir())):
                raise Mistake(f"{path} holds something that is not a token store; name another folder, or empty it.")
            files.remove_unfinished(path.parent, path.name)
            with files.whole_folder(path) as folder:
                if vocab is None:
                    vocab = _make_vocab(counted, config)
                end = vocab.end_of_documents(config.document_end) if documents else None
                header = Header(
                    name=name,
                    unit=vocab.unit,
                    newlines=vocab.newlines,
                    dtype=vocab.dtype.str,
                    vocab_size=len(vocab),
                    vocab=vocab.fingerprint,
                    splits={
                        split: _write_ids(folder / f"{split}.bin", each, vocab, documents, end, name)
                        for split, each in texts.items()
                    },
                )
                if check:
                    check(header)
                (folder / "vocab.json").write_text(json.dumps(vocab.to_json()) + "\n", encoding="utf-8")
                (folder / "corpus.json").write_text(json.dumps(header.to_json(), indent=1) + "\n", encoding="utf-8")
        return cls.open(path)


def _make_vocab(texts: Sequence[Text], config: CorpusConfig) -> Vocab:
    """The vocabulary of texts, as `Corpus.build` describes it."""
    unit, document_end = config.unit, config.document_end
    assert unit != "id", "ids come with their vocabulary"
    end = document_end.encode()

    def parts() -> Iterator[bytes]:
        for document in chain.from_iterable(map(documents, texts)):
            yield from pieces(document, unit)
            yield end

    if unit != "bpe":
        vocab = Vocab.build(unit, parts(), newlines=config.newlines, min_count=config.min_count)
        rare = unit == "word" and len(document_end.split()) == 1 and vocab.id_of(document_end) is None
        return replace(vocab, symbols=(*vocab.symbols, document_end)) if rare else vocab
    whole = [document_end] if document_end not in ("", "\n") else []
    words = (piece.replace(end, b"\n") if whole else piece for piece in parts())
    tokenizer = train_bpe((piece.decode() for piece in words), config.bpe_size, whole)
    vocab = Vocab.of_tokenizer(tokenizer, config.newlines)
    counts = np.zeros(len(vocab), np.int64)
    for piece in parts():
        counts += np.bincount(vocab.encode(piece), minlength=len(vocab))
    order = np.argsort(-counts, kind="stable")
    return Vocab.of_tokenizer(renumber(tokenizer, order.tolist()), config.newlines)


def _write_ids(
    file: Path, texts: Sequence[Text], vocab: Vocab, resets: bool, end: int | None, name: str
) -> SplitHeader:
    """Write the ids of the texts of a split of the corpus `name`; the header's entry. With `resets`, each document
    starts with an empty memory, or the id `end` follows each."""
    tokens, size, starts = 0, 0, []
    counts = np.zeros(len(vocab), np.int64)
    with file.open("wb") as out:
        for text in texts if vocab.unit == "id" else chain.from_iterable(map(documents, texts)):
            begin = tokens
            for ids, length in _encode(text, vocab, end, opens=resets or begin == 0):
                size += length
                out.write(ids.data)
                tokens += ids.size
                np.add.at(counts, ids, 1)
            if tokens > begin:
                starts += (begin + document_starts(text)).tolist() if vocab.unit == "id" else [begin]
    if tokens < 2:
        raise Mistake(
            f"The {file.stem} split of {name} must have at least 2 tokens, because the first is context, and has "
            f"{tokens}. Give more text."
        )
    return SplitHeader(
        tokens=tokens,
        types=int(np.count_nonzero(counts)),
        unknown=0 if vocab.unk is None else int(counts[vocab.unk]),
        bytes=size,
        sha256=files.digest_of(file),
        documents=starts if resets and end is None else None,
    )


def _encode(
    text: Text, vocab: Vocab, end: int | None, *, opens: bool
) -> Iterator[tuple[Integer[np.ndarray, " T"], int]]:
    """The ids of a text, piece by piece, and the size of each piece in bytes. `opens`: a sentence may begin here. The
    id `end` follows each document."""
    if vocab.unit == "id":
        assert isinstance(text, Span), "ids are in a file"
        size = read_ids(text.file).ids[text.start : text.end].nbytes  # without the ids that end documents
        for block in id_blocks(text, len(vocab), end):
            yield block.astype(vocab.dtype), size
            size = 0
        return
    tokens, opens, last = 0, opens and vocab.newlines == "sentence", vocab.opening_ids.tolist()
    for piece in pieces(text, vocab.unit):
        ids = vocab.encode(b"\n" + piece if opens and not tokens else piece, start=tokens)
        tokens += ids.size
        last = [*last, *ids[-2:].tolist()][-2:]
        yield ids, len(piece)
    written = last[:-1] if last[-1:] == [vocab.line_end] else last  # `pieces` ends the last line of words
    if end is not None and end not in (*written[-1:], *last[-1:]):
        yield np.array([end], vocab.dtype), 0
