"""Published corpora and any other text: from files to a `Corpus` in the cache.

A published corpus is a row of `DATASETS`: its files with their SHA-256, how they are cut, and the counts the literature
gives for them; `prepare` refuses anything else. Any other text file or folder is tokenised on the fly by `open_corpus`,
under a name made from its content, so that a changed file is tokenised again.
"""

from __future__ import annotations

import bz2
import codecs
import difflib
import gzip
import hashlib
import json
import lzma
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from transformer_xl.data.corpus import SPLITS, Corpus, border, closed_vocab
from transformer_xl.data.vocab import Newlines, Unit, Vocab
from transformer_xl.settings import CorpusConfig


@dataclass(frozen=True)
class Published:
    """What the literature counts: tokens of train, valid and test, and symbols of the vocabulary."""

    tokens: tuple[int, ...]
    vocab_size: int


@dataclass(frozen=True)
class Dataset:
    """A corpus with a fixed protocol. As in the original code, all three splits count towards the vocabulary."""

    unit: Unit
    files: Mapping[str, str]
    """Name to SHA-256: one file to cut, or train, valid and test in order."""
    protocols: Mapping[Newlines, Published]
    """The published treatment of line ends first."""
    cuts: tuple[int, int] | None = None
    """Bytes at which validation and test start in a single file."""


DATASETS = {
    "enwik8": Dataset(
        unit="byte",
        files={"enwik8": "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"},
        protocols={
            "drop": Published((88_982_818, 4_945_742, 4_943_417), 204),
            "keep": Published((90_000_000, 5_000_000, 5_000_000), 205),
        },
        cuts=(90_000_000, 95_000_000),
    ),
    "ptb": Dataset(
        unit="word",
        files={
            "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
            "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
            "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
        },
        protocols={"keep": Published((929_589, 73_760, 82_430), 10_000)},
    ),
}

_OPENERS = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
_SPLIT_NAMES = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}


def cache_folder() -> Path:
    """Where token stores live: the environment's TXL_HOME, else the user's cache directory for txl."""
    home = os.environ.get("TXL_HOME")
    return Path(home).expanduser() if home else platformdirs.user_cache_path("txl")


def prepare(name: str, source: str | Path, *, newlines: Newlines) -> Corpus:
    """Tokenise the published corpus `name` from local files into the cache.

    `source` is the folder that holds its files, or the file where there is just one; compressed (.xz, .gz, .bz2) or
    plain. The protocol `newlines` is one of `DATASETS[name].protocols`, each a store of its own. `ValueError` where
    the content is not the published one, `FileNotFoundError` where a file is missing.
    """
    dataset = _dataset(name, newlines)
    texts = []
    for file, sha256 in dataset.files.items():
        path = _find(Path(source).expanduser(), file, name)
        text = read_file(path)
        if (found := hashlib.sha256(text).hexdigest()) != sha256:
            raise ValueError(
                f"{path} is not the published {file}: its content has SHA-256 {found} ({len(text):,} bytes), and "
                f"must have {sha256}. Download it again."
            )
        texts.append(text)
    if dataset.cuts:
        valid, test = dataset.cuts
        texts = [texts[0][:valid], texts[0][valid:test], texts[0][test:]]
    vocab = closed_vocab(dataset.unit, texts, newlines=newlines)
    splits: dict[str, bytes] = dict(zip(SPLITS, texts, strict=True))
    published = dataset.protocols[newlines]
    corpus = Corpus.build(_store(name, newlines), splits, name=name, source=name, vocab=vocab)
    counted = Published(tuple(corpus.header.splits[split].tokens for split in SPLITS), len(vocab))
    if counted != published:
        shutil.rmtree(corpus.path)
        raise ValueError(f"{name} must come to {published}, and came to {counted}. Please report this.")
    return corpus


def open_corpus(config: CorpusConfig, vocab: Vocab | None = None) -> Corpus:
    """The corpus that `config.name` means: a published one that was prepared, a token store, or a text file or folder.

    Text is tokenised into the cache, with `vocab` where it is given (a trained model's). A file is cut 90 : 5 : 5 by
    position. So are the files of a folder, glued in the order of their names, unless they are named train, valid (or
    validation) and test, as in `ptb.train.txt`; with `reset_documents` whole files are held out.
    """
    if not config.name:
        raise ValueError(f"corpus.name must be a text file, a folder or one of {', '.join(DATASETS)}; it is empty.")
    path = Path(config.name).expanduser()
    if config.name in DATASETS:
        protocols = DATASETS[config.name].protocols
        other = vocab is not None and config.newlines not in protocols  # a model's setting says nothing of this text
        corpus = _open_prepared(config.name, next(iter(protocols)) if other else config.newlines)
    elif (path / "corpus.json").is_file():
        corpus = Corpus.open(path)
    elif path.exists():
        return _tokenise(path, config, vocab)
    else:
        close = difflib.get_close_matches(config.name, DATASETS, n=1)
        raise FileNotFoundError(
            f"corpus.name must be a text file, a folder or one of {', '.join(DATASETS)}, and there is no {config.name}."
            + (f" Did you mean {close[0]}?" if close else "")
        )
    if vocab is not None and vocab != corpus.vocab:
        raise ValueError(
            f"The model's vocabulary ({vocab}) is not that of the corpus {corpus.name} ({corpus.vocab}). Use a corpus "
            "prepared as for its training, or give plain text, which is then tokenised with the model's vocabulary."
        )
    if vocab is None and config.unit != corpus.unit:
        raise ValueError(f'corpus.unit must be "{corpus.unit}" for the corpus {corpus.name}, got "{config.unit}".')
    return corpus


def read_file(path: Path) -> bytes:
    """The content of `path`, decompressed where its name ends in .xz, .gz or .bz2; errors say which file and why."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} must be a file, and is a folder.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} must be a file, and is a pipe or a device. Save its content in a file first.")
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as opened:
            return opened.read()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no file {path}.") from error
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a sound {path.suffix} file: {error}. Download it again.") from error
    except OSError as error:
        raise OSError(f"Cannot read {path}: {error.strerror or error}.") from error


def _dataset(name: str, newlines: Newlines) -> Dataset:
    if name not in DATASETS:
        raise ValueError(f"The corpus must be one of {', '.join(DATASETS)}, got {name!r}.")
    if newlines not in DATASETS[name].protocols:
        raise ValueError(
            f"corpus.newlines must be {' or '.join(map(repr, DATASETS[name].protocols))} for {name}, got {newlines!r}."
        )
    return DATASETS[name]


def _store(name: str, newlines: Newlines) -> Path:
    """The published protocol has the plain name, as in enwik8; another one says so, as in enwik8-keep."""
    published = next(iter(DATASETS[name].protocols))
    return cache_folder() / "corpora" / (name if newlines == published else f"{name}-{newlines}")


def _open_prepared(name: str, newlines: Newlines) -> Corpus:
    published = next(iter(_dataset(name, newlines).protocols))
    store = _store(name, newlines)
    if not (store / "corpus.json").is_file():
        option = "" if newlines == published else f" --newlines {newlines}"
        raise FileNotFoundError(
            f"The corpus {name} (newlines = {newlines!r}) is not prepared in {store.parent}: run "
            f"`txl data {name} --source PATH{option}`, where PATH holds {', '.join(DATASETS[name].files)}."
        )
    return Corpus.open(store)


def _find(source: Path, file: str, name: str) -> Path:
    if source.is_file() and len(DATASETS[name].files) == 1:
        return source
    for path in (source / f"{file}{suffix}" for suffix in ("", *_OPENERS)):
        if path.is_file():
            return path
    needed = ", ".join(DATASETS[name].files)
    raise FileNotFoundError(f"--source must be a folder with {needed} (or those as .xz), and {source} has no {file}.")


def _tokenise(path: Path, config: CorpusConfig, vocab: Vocab | None) -> Corpus:
    unit, newlines = (config.unit, config.newlines) if vocab is None else (vocab.unit, vocab.newlines)
    splits = read_splits(path, unit, whole_files=config.reset_documents)
    settings = [unit, newlines, config.min_count, config.reset_documents, vocab.fingerprint if vocab else None]
    digest = hashlib.sha256(json.dumps(settings).encode())
    for split, texts in splits.items():
        digest.update(f"{split} {[len(text) for text in texts]}".encode())
        for text in texts:
            digest.update(text)
    path = path.resolve()
    return Corpus.build(
        cache_folder() / "texts" / f"{path.stem}-{digest.hexdigest()[:16]}",
        splits,
        name=path.name,
        source=str(path),
        unit=unit,
        newlines=newlines,
        min_count=config.min_count,
        vocab=vocab,
        documents=config.reset_documents,
        reuse=True,
    )


def read_splits(path: Path, unit: Unit, *, whole_files: bool = False) -> dict[str, list[bytes]]:
    """The texts of each split of a file or folder, as `open_corpus` says; empty files and hidden ones are left out."""
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
    text = text.removeprefix(codecs.BOM_UTF8)
    try:
        text.decode("utf-8")
        broken = text.find(b"\0")
    except UnicodeDecodeError as error:
        broken = error.start
    if broken >= 0:
        raise ValueError(
            f"{file} must be UTF-8 text for a corpus of {unit}s, and is binary or in another encoding: byte {broken:,} "
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
