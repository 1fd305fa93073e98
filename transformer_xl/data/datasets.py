"""Open a `Corpus` by name: a published corpus that was prepared, a token store, or any text.

The cache keeps the token store of a text under a hash of its content, so a changed file is tokenised again.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import chain
from pathlib import Path

import platformdirs

from ..config.settings import CorpusConfig, Newlines
from ..config.values import value_text
from ..mistake import Mistake, did_you_mean, printable
from ..runtime.files import digest_of_json, plain_file
from .corpora.archive import unpack_if_archive
from .corpora.published import DATASETS, Dataset
from .corpus import VERSION, Corpus
from .ids import MOST_IDS, id_blocks
from .reading import expand_home, pieces, read_file
from .texts import read_splits
from .vocab import Vocab


def cache_folder() -> Path:
    """The folder of token stores and downloads: TXL_HOME if it is set, otherwise the user's cache folder for txl."""
    home = os.environ.get("TXL_HOME")
    return expand_home(home) if home else platformdirs.user_cache_path("txl")


def open_corpus(
    config: CorpusConfig | str | Path,
    vocab: Vocab | None = None,
    *,
    whole: bool = False,
    extend: bool = False,
    scored: bool = False,
) -> Corpus:
    """Open the corpus `config.name`: a prepared corpus, a token store, or a text file, folder or archive.

    Instead of a `config`, a name opens a prepared corpus as it is, and a path opens a text as bytes. Text is tokenised
    into the cache. The vocabulary is `vocab` (of a trained model) if it is given, otherwise the file `config.vocab` if
    it is set, otherwise made from the text: for ids, up to the largest id of all splits. `read_splits` describes the
    splits and `whole`. With `extend`, tokens of the training split that `vocab` lacks are added to it. With `scored`
    the settings are those of a trained model's own text: `column` has no effect where there is no table and no JSON
    line, and `reset_documents` none on a single document.

    Raises:
        FileNotFoundError: there is no such corpus or text.
        ValueError: the corpus does not fit `vocab` or the settings.
    """
    checked = isinstance(config, CorpusConfig)
    config = config if isinstance(config, CorpusConfig) else CorpusConfig(name=str(config))
    if not config.name:
        raise Mistake(f"corpus.name must be a text file, a folder or one of {', '.join(DATASETS)}; it is empty.")
    path, store = expand_home(config.name), store_of(config.name)
    if config.name in DATASETS:
        dataset = DATASETS[config.name]
        newlines = config.newlines if checked else dataset.newlines if vocab is None else vocab.newlines
        other = vocab is not None and newlines not in dataset.protocols  # this setting is of the model's text
        corpus = _open_prepared(config.name, dataset.newlines if other else newlines)
    elif store is not None:
        corpus = Corpus.open(store)
    elif path.exists():
        return _tokenise(path, config, vocab, whole, extend, scored)
    else:
        raise missing_corpus(config.name)
    if extend:
        raise Mistake(f"corpus.extend_vocab is for a text, and {corpus.name} is tokenised. Give its text by --data.")
    if vocab is None and checked:
        _check_settings(config, corpus)
    return corpus if vocab in (None, corpus.vocab) else corpus.in_vocabulary(vocab)


def store_of(name: str) -> Path | None:
    """The folder of a token store: of a prepared corpus with this name, or at this path; None if there is none."""
    path = expand_home(name)
    folders = [store_folder(name), path] if path.name == name else [path]
    return next((folder for folder in folders if (folder / "corpus.json").is_file()), None)


def missing_corpus(name: str) -> FileNotFoundError:
    """The error for a name that is neither a corpus nor a text."""
    return FileNotFoundError(
        f"The corpus (--data) must be a text file, a folder or one of {', '.join(DATASETS)}, and there is no "
        f"{name}.{'' if expand_home(name).suffix else did_you_mean(name, DATASETS)}"
    )


def inherited(config: CorpusConfig, vocab: Vocab, theirs: CorpusConfig) -> CorpusConfig:
    """`config` for a model that goes on from one with this vocabulary, which was trained with the settings `theirs`."""
    return replace(
        config,
        unit=vocab.unit,
        newlines=vocab.newlines,
        document_end=config.document_end or theirs.document_end,
        bpe_size=theirs.bpe_size,
        min_count=config.min_count if config.extend_vocab else theirs.min_count,
    )


def _check_settings(config: CorpusConfig, corpus: Corpus) -> None:
    """Refuse settings that differ from the settings with which a token store was made."""
    own = {"unit": corpus.header.unit, "newlines": corpus.header.newlines, "vocab": "", "column": ""}
    apart = {split.documents is not None for split in corpus.header.splits.values()}
    own |= {"reset_documents": False} if False in apart else {}
    own |= {"document_end": ""} if True in apart else {}
    for setting, value in own.items():
        if (asked := getattr(config, setting)) != value:
            raise Mistake(
                f"corpus.{setting} must be {value_text(value)} for {corpus.name}, which is tokenised already, got "
                f"{value_text(asked)}. Leave it out, or give the corpus's text by --data."
            )


def dataset_of(name: str, newlines: Newlines | None) -> Dataset:
    """The published corpus with this name; raise `ValueError` if there is none, or none with these line ends."""
    if name not in DATASETS:
        raise Mistake(f"The corpus must be one of {', '.join(DATASETS)}, got {name!r}.{did_you_mean(name, DATASETS)}")
    protocols = DATASETS[name].protocols
    if newlines is not None and newlines not in protocols:
        known = " or ".join(map(repr, protocols))
        raise Mistake(f"--newlines (corpus.newlines) must be {known} for {name}, got {newlines!r}.")
    return DATASETS[name]


def store_folder(name: str, newlines: str = "") -> Path:
    """The folder of a prepared corpus: enwik8 if its line ends are treated as published, or else enwik8-keep."""
    published = not newlines or newlines == DATASETS[name].newlines
    return cache_folder() / "corpora" / (name if published else f"{name}-{newlines}")


def _open_prepared(name: str, newlines: Newlines) -> Corpus:
    option = "" if newlines == dataset_of(name, newlines).newlines else f" --newlines {newlines}"
    store = store_folder(name, newlines)
    if not (store / "corpus.json").is_file():
        raise FileNotFoundError(
            f"The corpus {name} (newlines = {newlines!r}) is not prepared in {store.parent}: run "
            f"`txl data {name}{option}`, with --source PATH for a local copy."
        )
    return Corpus.open(store)


def _tokenise(path: Path, config: CorpusConfig, vocab: Vocab | None, whole: bool, extend: bool, scored: bool) -> Corpus:
    if vocab is None and config.vocab:
        listed = expand_home(config.vocab)
        if not listed.is_file():
            raise FileNotFoundError(f"corpus.vocab must be a file, and {printable(str(listed))} is none. Name another.")
        vocab = Vocab.read(read_file(listed), str(listed), unit=config.unit, newlines=config.newlines)
    unit, newlines = (config.unit, config.newlines) if vocab is None else (vocab.unit, vocab.newlines)
    settings = [VERSION, unit, newlines, config.min_count, config.reset_documents, config.bpe_size, config.column]
    path = (path if path.is_dir() else plain_file(path)).resolve()  # a pipe is refused by the name that was given
    notes: list[str] = []
    with unpack_if_archive(path, cache_folder()) as files:
        texts = read_splits(files, unit, whole=whole, column=config.column)
        if config.column and not scored and not texts.documents:
            raise Mistake(
                f"corpus.column must be left out for {path}, which has no table (.parquet, .arrow, .csv, .tsv) and no "
                "JSON lines. Leave it out; a table that is packed must be unpacked."
            )
        single = not texts.documents and max(map(len, texts.splits.values())) == 1
        if config.reset_documents and not scored and single:
            raise Mistake(
                f"corpus.reset_documents must be false for {path}, which is one document a split: a document is a file "
                "of a folder, or a line of a .jsonl file. Leave it out."
            )
        if unit == "id" and (vocab is None or extend):
            blocks = (block for text in chain(*texts.splits.values()) for block in id_blocks(text, MOST_IDS))
            size = 1 + max(int(block.max()) for block in blocks)
            end = int(config.document_end) if config.document_end.isdecimal() else 0
            if end >= MOST_IDS:
                raise Mistake(f"corpus.document_end must be below {MOST_IDS:,}, got {end:,}. Name the id of a token.")
            size = max(size, end + 1)
            vocab = Vocab.of_ids(size if vocab is None else max(size, len(vocab)))
        elif vocab is not None and extend:
            parts = (piece for text in texts.splits.get("train", ()) for piece in pieces(text, unit))
            ends = [config.document_end] * config.min_count
            known, vocab = len(vocab), vocab.extended(chain(parts, ends), config.min_count)
            notes.append(f"{len(vocab) - known:,} new {unit}s were added to the vocabulary of {known:,}.")
        settings += [config.document_end, vocab.fingerprint if vocab else None, texts.digest]
        digest = digest_of_json(settings)
        corpus = Corpus.build(
            cache_folder() / "texts" / f"{path.stem[:48]}-{digest[:16]}",  # names have at most 255 bytes
            texts.splits,
            config,
            name=path.name,
            vocab=vocab,
            documents=texts.documents or (config.reset_documents and not single),
            reuse=True,
            check=texts.check,
        )
    lost = [corpus.vocab.lost] if corpus.vocab.lost else []
    header = replace(corpus.header, name=path.name)  # the store may be of another file with this text
    return replace(corpus, header=header, notes=(*texts.notes, *notes, *lost))
