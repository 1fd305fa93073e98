"""`prepare`, the work of `txl data`: convert a published corpus, downloaded or local, to a token store.

It refuses content or counts that differ from the published ones. If files are missing, the store is called partial.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from ...config.values import listing
from ...mistake import Mistake
from ...runtime.files import explain_write_error
from ..corpus import Corpus
from ..datasets import cache_folder, dataset_of, store_folder
from ..header import Header
from ..reading import OPENERS, Text, expand_home, open_file, read_errors, read_file
from ..vocab import Newlines, Vocab
from .archive import unpack_if_archive
from .download import download
from .published import DATASETS, Counts, Dataset, Protocol


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
        source: a folder with its files, an archive of them, or the only file; compressed (.xz, .gz, .bz2) or plain.
            None downloads it.
        newlines: the treatment of line ends; None is the published one. Each treatment has a separate store.
        partial: accept that files are missing. The store is then called `name-partial` and records what is missing.
        vocab_file: take the words of this file. The store's name then includes the file's name, except for the
            published file.

    Raises:
        ValueError: content or counts differ from the published ones.
        OSError: a file is missing, cannot be read or cannot be downloaded.
    """
    dataset = dataset_of(name, newlines)
    newlines = newlines or dataset.newlines
    with _source_files(name, source, partial=partial) as found:
        if partial and dataset.substitute and dataset.substitute.replaces(dataset, found):
            dataset = dataset.substitute
        protocol = dataset.protocols[newlines]
        needed = [file for file in dataset.files if vocab_file is None or file != dataset.vocab_file]
        taken = _choose_texts(dataset, found, needed, protocol.splits, partial=partial)
        counted = dataset.counted if set(dataset.counted) <= taken.texts.keys() else tuple(taken.texts)
        listed = found.get(dataset.vocab_file) if taken.notes or dataset.vocab_file in dataset.files else None
        listed = listed if vocab_file is None else expand_home(vocab_file)
        vocab, other = _read_vocab(dataset, listed, newlines)
        own_words = bool(other)
        if taken.notes and vocab is None and dataset.unit == "word":
            taken.notes.append(f"its words are those of its {' and '.join(counted)} split")
            own_words = True
        store_name = name + (f"+{other}" if other else "") + ("-partial" if taken.notes else "")
        try:
            return Corpus.build(
                store_folder(store_name, "" if newlines == dataset.newlines else newlines),
                taken.texts,
                name=store_name,
                source=name,
                partial="; ".join(taken.notes),
                unit=dataset.unit,
                newlines=newlines,
                vocab=vocab,
                counted=counted,
                closed=not own_words,
                check=lambda header: _check_counts(header, taken.counts, None if own_words else protocol),
            )
        except UnicodeDecodeError as error:
            raise Mistake(f"A file of {name} is not the published one: it is not UTF-8 text ({error}).") from error


def _read_vocab(dataset: Dataset, listed: Path | None, newlines: Newlines) -> tuple[Vocab | None, str]:
    """The vocabulary in the file `listed`, and the file's name; "" if the file belongs to the corpus."""
    if listed is None:
        return None, ""
    name = _plain_name(listed)
    if name == dataset.vocab_file:
        _verify(name, listed, dataset.listed)
    vocab = Vocab.read(read_file(listed), str(listed), unit=dataset.unit, newlines=newlines)
    return vocab, "" if name == dataset.vocab_file else name.removesuffix(".txt")


class _Chosen(NamedTuple):
    """The available texts of a corpus."""

    texts: dict[str, list[Text]]
    counts: dict[str, Counts]
    """The published counts of the complete splits."""
    notes: list[str]
    """The missing parts, in words."""


def _choose_texts(
    dataset: Dataset,
    found: Mapping[str, Path],
    needed: Sequence[str],
    published: Mapping[str, Counts],
    *,
    partial: bool,
) -> _Chosen:
    """Verify the files found and choose the texts of each split."""
    missing = [file for file in needed if file not in found]
    if missing and (not partial or len(missing) == len(needed)):
        raise FileNotFoundError(
            f"--source must hold {listing(needed, 4)}, and lacks {listing(missing, 4)}. Give a whole copy, take what "
            "there is with --partial, or leave out --source to download all."
        )
    for file in needed:
        if file in found:
            _verify(file, found[file], dataset.files[file])
    taken = _Chosen({}, dict(published), [dataset.note] if dataset.note else [])
    if dataset.cuts:
        first, second = dataset.cuts
        text = read_file(found[needed[0]])
        taken.texts.update(train=[text[:first]], valid=[text[first:second]], test=[text[second:]])
    for split, files in dataset.splits.items():
        there = [found[file] for file in files if file in found]
        if there:
            taken.texts[split] = [dataset.spelling(read_file(path)) for path in there] if dataset.spelling else [*there]
        if len(there) < len(files):
            taken.counts.pop(split, None)
            taken.notes.append(
                f"{len(there)} of {len(files)} files of its {split} split" if there else f"no {split} split"
            )
    if dataset.vocab_file in missing:
        taken.notes.append("no vocabulary file")
    return taken


def _verify(name: str, path: Path, published: str) -> None:
    """Compare the content of a file with its published digest, if there is one."""
    if not published:
        return
    algorithm, _, digest = published.partition(":")
    with read_errors(path), open_file(path) as opened:
        found = hashlib.file_digest(opened, algorithm).hexdigest()  # type: ignore[arg-type]
    if found != digest:
        raise Mistake(
            f"{path} is not the published {name}: its content has {algorithm.upper()} {found}, and must have {digest}. "
            "Download it again."
        )


def _check_counts(header: Header, published: Mapping[str, Counts], protocol: Protocol | None) -> None:
    """Refuse a corpus whose token counts differ from the published ones. With `protocol`, compare all counts."""
    wrong = []
    if protocol and protocol.vocab_size not in (None, header.vocab_size):
        wrong.append(f"{header.vocab_size:,} entries of the vocabulary, not {protocol.vocab_size:,}")
    for split, counts in published.items():
        for name in ("tokens", "types", "unknown") if protocol else ("tokens",):
            found, must = getattr(header.splits[split], name), getattr(counts, name)
            if must not in (None, found):
                wrong.append(f"{found:,} {name} in {split}, not {must:,}")
    if wrong:
        raise Mistake(f"{header.name} has {'; '.join(wrong)}. Its files are not the published ones.")


@contextmanager
def _source_files(name: str, source: str | Path | None, *, partial: bool) -> Iterator[dict[str, Path]]:
    """Yield the available files of a corpus by published name. Unpacked files are removed afterwards."""
    dataset = DATASETS[name]
    downloads = cache_folder() / "downloads" / name
    if source is not None:
        places = [expand_home(source)]
        if not (places[0].is_dir() or places[0].is_file()):
            raise FileNotFoundError(
                f"--source must be a folder, an archive or a file, and {places[0]} is missing, a pipe or a device."
            )
    elif partial:
        raise Mistake("--partial takes what a local copy holds: say with --source where it is.")
    else:
        places = _download_all(dataset, downloads)
    names = [*dataset.files, dataset.vocab_file, *(dataset.substitute.files if dataset.substitute else ())]
    found: dict[str, Path] = {}
    with ExitStack() as stack:
        for place in places:
            found |= _files_in(stack.enter_context(unpack_if_archive(place, downloads)), names)
        if len(dataset.files) == 1 and not found and places[0].is_file():
            found = {names[0]: places[0]}  # a file of any name
        yield found


def _download_all(dataset: Dataset, downloads: Path) -> list[Path]:
    """Download every package of a corpus, in one process at a time."""
    with explain_write_error(downloads):
        downloads.mkdir(parents=True, exist_ok=True)
    with FileLock(downloads / ".lock"):
        paths = [
            download(package.origins, downloads, check=partial(_verify_package, dataset, package.files))
            for package in dataset.packages
        ]
    return list(dict.fromkeys(paths))


def _verify_package(dataset: Dataset, names: Sequence[str], path: Path) -> None:
    """Compare the files of a package (one file or an archive) with the published ones."""
    with unpack_if_archive(path, path.parent) as place:
        found = _files_in(place, names) if place.is_dir() else {names[0]: place}
        for name in names:
            if name not in found:
                raise Mistake(f"it has no file {name}")
            _verify(name, found[name], dataset.files[name])


def _files_in(place: Path, names: Sequence[str]) -> dict[str, Path]:
    """The paths of files with these names: `place` itself, or files in or below the folder `place`.

    Of two files with a name, the one nearer to the folder is taken, and a plain one before a compressed one.
    """
    paths = place.rglob("*") if place.is_dir() else [place]
    found: dict[str, Path] = {}
    for path in sorted(paths, key=lambda path: (len(path.parts), path)):
        if _plain_name(path) in names and path.is_file():
            found.setdefault(_plain_name(path), path)
    return found


def _plain_name(path: Path) -> str:
    """The name of a file without .xz, .gz or .bz2."""
    return path.name.removesuffix(path.suffix) if path.suffix in OPENERS else path.name
