"""From a name to a `Corpus`: published corpora downloaded or taken from a local copy, and any text tokenised.

`prepare` makes a token store of a published corpus, and refuses content or counts that are not the published ones.
Any other text is tokenised by `open_corpus`, under a name made from its content, so that a changed file is tokenised
again.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import platformdirs
from filelock import FileLock

from transformer_xl.data.archive import unpack
from transformer_xl.data.corpus import Corpus, Header
from transformer_xl.data.download import download
from transformer_xl.data.published import DATASETS, SPLITS, Counts, Dataset, File, Package, Protocol
from transformer_xl.data.reading import OPENERS, Text, open_file, read_file, reading
from transformer_xl.data.texts import read_splits
from transformer_xl.data.vocab import Newlines, Vocab
from transformer_xl.files import explained
from transformer_xl.settings import CorpusConfig


def cache_folder() -> Path:
    """Where token stores and downloads live: the environment's TXL_HOME, else the user's cache directory for txl."""
    home = os.environ.get("TXL_HOME")
    return Path(home).expanduser() if home else platformdirs.user_cache_path("txl")


def prepare(
    name: str,
    source: str | Path | None = None,
    *,
    newlines: Newlines | None = None,
    partial: bool = False,
    vocab_file: str | Path | None = None,
) -> Corpus:
    """Tokenise the published corpus `name` into the cache.

    Args:
        source: the folder that holds its files, an archive of them, or the file where there is just one; compressed
            (.xz, .gz, .bz2) or plain. None downloads it.
        newlines: one of its protocols, each a store of its own; None is the published one.
        partial: take what there is. The store is then called `name-partial`, and says what is missing.
        vocab_file: take the words of this file. The store is then named after it, too, unless it is the published one.

    Raises:
        ValueError: content or counts are not the published ones.
        OSError: a file is missing, cannot be read or cannot be downloaded.
    """
    dataset = _dataset(name, newlines, "--newlines")
    newlines = newlines or dataset.newlines
    protocol = dataset.protocols[newlines]
    with _found(name, source, partial=partial) as found:
        needed = [file for file in dataset.files if vocab_file is None or file != dataset.vocab_file]
        taken = _take(name, found, needed, protocol.splits, partial=partial)
        listed = found.get(dataset.vocab_file) if taken.notes or dataset.vocab_file in dataset.files else None
        listed = listed if vocab_file is None else Path(vocab_file).expanduser()
        published = listed is not None and _plain_name(listed) == dataset.vocab_file
        if listed is not None and published and dataset.listed is not None:
            _verify(dataset.vocab_file, listed, dataset.listed)
        # From the whole training part the same words come in another order.
        other = "" if listed is None or (published and (dataset.listed is None or taken.notes)) else _plain_name(listed)
        vocab = Vocab.read(read_file(listed), str(listed), unit=dataset.unit, newlines=newlines) if listed else None
        counted = dataset.counted if set(dataset.counted) <= taken.texts.keys() else tuple(taken.texts)
        own_words = bool(other)
        if taken.notes and vocab is None and dataset.unit == "word":
            taken.notes.append(f"its words are those of its {' and '.join(counted)} part")
            own_words = True
        called = name + (f"+{other.removesuffix('.txt')}" if other else "") + ("-partial" if taken.notes else "")
        return Corpus.build(
            _store(called, "" if newlines == dataset.newlines else newlines),
            taken.texts,
            name=called,
            source=name,
            partial="; ".join(taken.notes),
            unit=dataset.unit,
            newlines=newlines,
            vocab=vocab,
            counted=counted,
            closed=not own_words,
            check=lambda header: _check_counts(header, taken.counts, None if own_words else protocol),
        )


def open_corpus(config: CorpusConfig, vocab: Vocab | None = None) -> Corpus:
    """The corpus that `config.name` means: one that was prepared, a token store, or a text file or folder.

    Text is tokenised into the cache, with `vocab` where it is given (a trained model's), else with the symbols that
    `config.vocab` lists; `read_splits` says how it is cut.
    """
    if not config.name:
        raise ValueError(f"corpus.name must be a text file, a folder or one of {', '.join(DATASETS)}; it is empty.")
    path = Path(config.name).expanduser()
    prepared = _store(config.name, "") if path.name == config.name else path
    if config.name in DATASETS:
        dataset = DATASETS[config.name]
        other = vocab is not None and config.newlines not in dataset.protocols  # a model's setting, not this text's
        corpus = _open_prepared(config.name, dataset.newlines if other else config.newlines)
    elif (prepared / "corpus.json").is_file():
        corpus = Corpus.open(prepared)
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
    if (
        vocab is None
        and config.reset_documents
        and any(split.documents is None for split in corpus.header.splits.values())
    ):
        raise ValueError(f"corpus.reset_documents must be false for the corpus {corpus.name}, which has no documents.")
    for setting in ("unit", "newlines") if vocab is None else ():
        own, asked = getattr(corpus.header, setting), getattr(config, setting)
        if own != asked:
            raise ValueError(f'corpus.{setting} must be "{own}" for the corpus {corpus.name}, got "{asked}".')
    if vocab is None and config.vocab:
        raise ValueError(
            f"corpus.vocab is for a text file or folder, and {corpus.name} is tokenised already. Leave it out, or "
            "prepare the corpus with `txl data NAME --vocab FILE`."
        )
    return corpus


def tokenised(name: str) -> bool:
    """Whether the corpus of that name has its punctuation apart, and is better shown as `readable` text."""
    own = name.removesuffix("-partial").partition("+")[0]
    return own in DATASETS and DATASETS[own].tokenised


class _Taken(NamedTuple):
    """What there is of a corpus."""

    texts: dict[str, list[Text]]
    counts: dict[str, Counts]
    """What is published for those splits that are whole, or a known part."""
    notes: list[str]
    """What is missing."""


def _take(
    name: str, found: Mapping[str, Path], needed: Sequence[str], published: Mapping[str, Counts], *, partial: bool
) -> _Taken:
    """The verified texts of each split, from the files found."""
    dataset = DATASETS[name]
    parts = {file: part for file, part in dataset.substitutes.items() if file not in found and part.name in found}
    paths = {**found, **{file: found[part.name] for file, part in parts.items()}} if partial else found
    missing = [file for file in needed if file not in paths]
    if missing and (not partial or len(missing) == len(needed)):
        raise FileNotFoundError(
            f"--source must hold {_listed(needed)}, and lacks {_listed(missing)}. "
            + ("Give it with --vocab FILE, or " if missing == [dataset.vocab_file] else "Give a whole copy, or ")
            + (
                "leave out --source to download one."
                if partial
                else "take what there is of a folder with --partial, or leave out --source to download all."
            )
        )
    for file in paths.keys() & set(needed):
        known = dataset.files[file]
        _verify(file, paths[file], replace(known, digest=parts[file].digest) if file in parts else known)
    taken = _Taken({}, dict(published), [part.note for part in parts.values()])
    if not dataset.splits:
        [file] = dataset.files
        cuts = dataset.cuts
        if file in parts:
            cuts = parts[file].cuts
            taken.counts.clear()
        assert cuts is not None, "a single file is cut"
        text = read_file(paths[file])
        taken.texts.update(zip(SPLITS, ([text[: cuts[0]]], [text[slice(*cuts)]], [text[cuts[1] :]]), strict=True))
    for split, files in dataset.splits.items():
        there = [paths[file] for file in files if file in paths]
        if there:
            taken.texts[split] = [dataset.spelling(read_file(path)) for path in there] if dataset.spelling else [*there]
        if len(there) < len(files):
            taken.counts.pop(split, None)
            taken.notes.append(
                f"{len(there)} of {len(files)} files of its {split} part" if there else f"no {split} part"
            )
    for part in parts.values():
        taken.counts.update(part.splits)
    if dataset.vocab_file in missing:
        taken.notes.append("no vocabulary file")
    return taken


def _verify(name: str, path: Path, known: File) -> None:
    """Hold a file against what is published of it: its digest, or where there is none that it is text and no larger."""
    algorithm, _, published = known.digest.partition(":")
    found, length, broken = hashlib.new(algorithm or "md5"), 0, False
    text = codecs.getincrementaldecoder("utf-8")()
    with reading(path), open_file(path) as opened:
        while length <= known.bytes and (piece := opened.read(1 << 20)):
            found.update(piece)
            length += len(piece)
            broken = broken or (not published and not _is_text(text, piece))
    if broken or not (published or _is_text(text, b"", last=True)):
        raise ValueError(f"{path} is not the published {name}: it is not UTF-8 text, or cut off.")
    if published and (length > known.bytes or found.hexdigest() != published):
        raise ValueError(
            f"{path} is not the published {name}: its content has {algorithm.upper()} {found.hexdigest()} "
            f"({length:,} bytes), and must have {published}. Download it again."
        )
    if length > known.bytes:
        raise ValueError(f"{path} is not the published {name}: it has more than {known.bytes:,} bytes.")


def _is_text(decoder: codecs.IncrementalDecoder, piece: bytes, *, last: bool = False) -> bool:
    try:
        decoder.decode(piece, last)
    except UnicodeDecodeError:
        return False
    return True


def _check_counts(header: Header, published: Mapping[str, Counts], protocol: Protocol | None) -> None:
    """Refuse a corpus that does not come to what is published: its tokens, and all else where `protocol` made it."""
    wrong = []
    if protocol and protocol.vocab_size not in (None, header.vocab_size):
        wrong.append(f"{header.vocab_size:,} symbols, not {protocol.vocab_size:,}")
    for split, counts in published.items():
        for name in ("tokens", "types", "unknown") if protocol else ("tokens",):
            came, must = getattr(header.splits[split], name), getattr(counts, name)
            if must not in (None, came):
                wrong.append(f"{came:,} {name} in {split}, not {must:,}")
    if wrong:
        raise ValueError(f"{header.name} came to {'; '.join(wrong)}. Its files are not the published ones.")


@contextmanager
def _found(name: str, source: str | Path | None, *, partial: bool) -> Iterator[dict[str, Path]]:
    """The files of a corpus that there are, by their published names; those that were unpacked go afterwards."""
    dataset = DATASETS[name]
    if source is None and partial:
        raise ValueError("--partial takes what a local copy holds: say with --source where it is.")
    path = None if source is None else Path(source).expanduser()
    if path is not None and not path.exists():
        raise FileNotFoundError(f"--source must be a folder, an archive or a file, and there is no {path}.")
    archive = path is not None and _is_archive(path)
    if archive and partial:
        raise ValueError(
            f"--partial needs a folder of files, and {path} is an archive. Unpack it, and give the folder."
        )
    names = [*dataset.files, *filter(None, [dataset.vocab_file]), *(part.name for part in dataset.substitutes.values())]
    if path is not None and path.is_dir():
        yield _files_in(path, names)
    elif path is not None and not archive:
        only = len(dataset.files) == 1 and _plain_name(path) not in names
        yield {next(iter(dataset.files)) if only else _plain_name(path): path}
    else:
        downloads = cache_folder() / "downloads" / name
        with explained(downloads):
            downloads.mkdir(parents=True, exist_ok=True)
        with FileLock(downloads / ".lock"), tempfile.TemporaryDirectory(dir=downloads, prefix="unpacked-") as folder:
            for left in downloads.glob("unpacked-*"):  # by a process that was killed
                if left != Path(folder):
                    shutil.rmtree(left, ignore_errors=True)
            if path is None:
                yield _downloaded(dataset, downloads, Path(folder))
            else:
                wanted = {file: known.bytes for file, known in dataset.files.items() if file != dataset.vocab_file}
                yield unpack(path, wanted, Path(folder))


def _is_archive(path: Path) -> bool:
    with reading(path):
        return path.is_file() and (zipfile.is_zipfile(path) or tarfile.is_tarfile(path))


def _downloaded(dataset: Dataset, downloads: Path, folder: Path) -> dict[str, Path]:
    """Every file of a corpus, by the first way to download them that works."""
    failures = []
    for packages in dataset.packages:
        found: dict[str, Path] = {}
        try:
            for package in packages:
                path = download(package.origins, downloads, check=partial(_trouble, dataset, package, folder))
                found |= _unpacked(dataset, package, folder, path)
        except (OSError, ValueError) as error:
            failures.append(str(error))
        else:
            return found
    raise OSError(" ".join(failures))


def _unpacked(dataset: Dataset, package: Package, folder: Path, path: Path) -> dict[str, Path]:
    """The verified files of a package, from its archive or as they came."""
    name, known = path.name.removesuffix(".part"), {file: dataset.files[file] for file in package.files}
    sizes = {file: content.bytes for file, content in known.items()}
    files = {name: path} if name in known else unpack(path, sizes, folder)
    for file, there in files.items():
        _verify(file, there, known[file])
    return files


def _trouble(dataset: Dataset, package: Package, folder: Path, path: Path) -> str:
    """Why a package is not the published one; empty if it is."""
    try:
        _unpacked(dataset, package, folder, path)
    except ValueError as error:
        return str(error)
    return ""


def _files_in(folder: Path, names: list[str]) -> dict[str, Path]:
    """Where in a folder, or below it, files of these names are, plain or compressed; the plain one first."""
    wanted = {f"{name}{suffix}": name for name in names for suffix in ("", *OPENERS)}
    found: dict[str, Path] = {}
    for paths in (folder.iterdir(), folder.rglob("*")):
        for path in sorted(path for path in paths if path.name in wanted and path.is_file()):
            found.setdefault(wanted[path.name], path)
        if len(found) == len(names):
            break
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, ... ({len(names)} files)"


def _plain_name(path: Path) -> str:
    """The name of a file without what says that it is compressed."""
    return path.name.removesuffix(path.suffix) if path.suffix in OPENERS else path.name


def _dataset(name: str, newlines: Newlines | None, option: str = "corpus.newlines") -> Dataset:
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(f"The corpus must be one of {', '.join(DATASETS)}, got {name!r}.{hint}")
    protocols = DATASETS[name].protocols
    if newlines is not None and newlines not in protocols:
        raise ValueError(
            f"{option} must be {' or '.join(map(repr, protocols))} for {name}, got {newlines!r}."
            + (" Leave it out." if len(protocols) == 1 and option.startswith("--") else "")
        )
    return DATASETS[name]


def _store(name: str, newlines: str) -> Path:
    """A published protocol has the plain name, as in enwik8; another one says so, as in enwik8-keep."""
    return cache_folder() / "corpora" / (f"{name}-{newlines}" if newlines else name)


def _open_prepared(name: str, newlines: Newlines) -> Corpus:
    published = _dataset(name, newlines).newlines
    store = _store(name, "" if newlines == published else newlines)
    if not (store / "corpus.json").is_file():
        option = "" if newlines == published else f" --newlines {newlines}"
        stores = [path.parent.name for path in store.parent.glob(f"{name}[-+]*/corpus.json")]
        others = [other for other in stores if other not in DATASETS]
        hint = f" Prepared are {', '.join(sorted(others))}: take one with --corpus.name." if others else ""
        raise FileNotFoundError(
            f"The corpus {name} (newlines = {newlines!r}) is not prepared in {store.parent}: run "
            f"`txl data {name}{option}`, with --source PATH for a local copy.{hint}"
        )
    return Corpus.open(store)


def _tokenise(path: Path, config: CorpusConfig, vocab: Vocab | None) -> Corpus:
    if vocab is None and config.vocab:
        listed = Path(config.vocab).expanduser()
        vocab = Vocab.read(read_file(listed), str(listed), unit=config.unit, newlines=config.newlines)
    unit, newlines = (config.unit, config.newlines) if vocab is None else (vocab.unit, vocab.newlines)
    splits = read_splits(path, unit, whole_files=config.reset_documents)
    settings = [unit, newlines, config.min_count, config.reset_documents, vocab.fingerprint if vocab else None]
    settings += [config.bpe_size] if unit == "bpe" else []
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
        vocab=vocab,
        min_count=config.min_count,
        bpe_size=config.bpe_size,
        documents=config.reset_documents,
        reuse=True,
    )
