"""`prepare`, which `txl data` runs: a published corpus, downloaded or from a local copy, becomes a token store.

It refuses content or counts other than the published ones, and calls a store partial if files are missing.
"""

from __future__ import annotations

import codecs
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from ...config.values import listing
from ...mistake import Mistake
from ...runtime.files import explain_write_error
from ..corpus import Corpus
from ..datasets import cache_folder, dataset_of, store_folder
from ..header import SPLITS, Header
from ..reading import OPENERS, Text, expand_home, open_file, read_errors, read_file
from ..vocab import Newlines, Vocab
from .archive import is_archive, unpack
from .download import download
from .published import DATASETS, Counts, Dataset, File, Package, Protocol


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
        source: a folder with its files, an archive of them, or the file itself if there is just one; compressed (.xz,
            .gz, .bz2) or plain. None downloads it.
        newlines: the treatment of line ends, each with a store of its own; None is the published one.
        partial: accept that files are missing. The store is then called `name-partial`, and says what is missing.
        vocab_file: take the words of this file. The name of the store then includes the file's name, unless the file is
            the published one.

    Raises:
        ValueError: content or counts are not the published ones.
        OSError: a file is missing, cannot be read or cannot be downloaded.
    """
    dataset = dataset_of(name, newlines, "--newlines")
    newlines = newlines or dataset.newlines
    protocol = dataset.protocols[newlines]
    with _source_files(name, source, partial=partial) as found:
        needed = [file for file in dataset.files if vocab_file is None or file != dataset.vocab_file]
        taken = _choose_texts(name, found, needed, protocol.splits, partial=partial)
        counted = dataset.counted if set(dataset.counted) <= taken.texts.keys() else tuple(taken.texts)
        listed = found.get(dataset.vocab_file) if taken.notes or dataset.vocab_file in dataset.files else None
        listed = listed if vocab_file is None else expand_home(vocab_file)
        vocab, other = _read_vocab(dataset, listed, newlines, whole=not taken.notes)
        own_words = bool(other)
        if taken.notes and vocab is None and dataset.unit == "word":
            taken.notes.append(f"its words are those of its {' and '.join(counted)} split")
            own_words = True
        store_name = name + (f"+{other}" if other else "") + ("-partial" if taken.notes else "")
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


def _read_vocab(dataset: Dataset, listed: Path | None, newlines: Newlines, *, whole: bool) -> tuple[Vocab | None, str]:
    """The vocabulary in the file `listed`, and the file's name unless the file belongs to the corpus.

    A file that only replaces a missing training split does not belong to a whole corpus: its words have another order.
    """
    if listed is None:
        return None, ""
    own = _plain_name(listed) == dataset.vocab_file
    if own and dataset.listed is not None:
        _verify(dataset.vocab_file, listed, dataset.listed)
    vocab = Vocab.read(read_file(listed), str(listed), unit=dataset.unit, newlines=newlines)
    belongs = own and not (whole and dataset.listed)
    return vocab, "" if belongs else _plain_name(listed).removesuffix(".txt")


class _Chosen(NamedTuple):
    """The available texts of a corpus."""

    texts: dict[str, list[Text]]
    counts: dict[str, Counts]
    """The published counts of the splits that are whole or known substitutes."""
    notes: list[str]
    """What is missing, in words."""


def _choose_texts(
    name: str, found: Mapping[str, Path], needed: Sequence[str], published: Mapping[str, Counts], *, partial: bool
) -> _Chosen:
    """Verify the files found and choose the texts of each split."""
    dataset = DATASETS[name]
    substitutes = dataset.substitutes if partial else {}
    parts = {file: part for file, part in substitutes.items() if file not in found and part.name in found}
    paths = {**found, **{file: found[part.name] for file, part in parts.items()}}
    missing = [file for file in needed if file not in paths]
    if missing and (not partial or len(missing) == len(needed)):
        raise FileNotFoundError(
            f"--source must hold {listing(needed, 4)}, and lacks {listing(missing, 4)}. "
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
    taken = _Chosen({}, dict(published), [part.note for part in parts.values()])
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
                f"{len(there)} of {len(files)} files of its {split} split" if there else f"no {split} split"
            )
    for part in parts.values():
        taken.counts.update(part.splits)
    if dataset.vocab_file in missing:
        taken.notes.append("no vocabulary file")
    return taken


def _verify(name: str, path: Path, known: File) -> None:
    """Compare a file with its published digest; without one, check that it is text and not too large."""
    algorithm, _, published = known.digest.partition(":")
    found, length, text = hashlib.new(algorithm or "md5"), 0, codecs.getincrementaldecoder("utf-8")()
    with read_errors(path), open_file(path) as opened:
        try:
            while length <= known.bytes and (piece := opened.read(1 << 20)):
                found.update(piece)
                length += len(piece)
                text.decode(b"" if published else piece)
            text.decode(b"", final=length <= known.bytes)
        except UnicodeDecodeError as error:
            raise Mistake(f"{path} is not the published {name}: it is not UTF-8 text, or cut off.") from error
    if published and (length > known.bytes or found.hexdigest() != published):
        raise Mistake(
            f"{path} is not the published {name}: its content has {algorithm.upper()} {found.hexdigest()} "
            f"({length:,} bytes), and must have {published}. Download it again."
        )
    if length > known.bytes:
        raise Mistake(f"{path} is not the published {name}: it has more than {known.bytes:,} bytes.")


def _check_counts(header: Header, published: Mapping[str, Counts], protocol: Protocol | None) -> None:
    """Refuse a corpus whose numbers of tokens are not the published ones; `protocol` adds all other counts."""
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
    """Yield the available files of a corpus by their published names; unpacked files are removed afterwards."""
    dataset = DATASETS[name]
    if source is None and partial:
        raise Mistake("--partial takes what a local copy holds: say with --source where it is.")
    path = None if source is None else expand_home(source)
    if path is not None and not path.exists():
        raise FileNotFoundError(f"--source must be a folder, an archive or a file, and there is no {path}.")
    archive = path is not None and path.is_file() and is_archive(path)
    if archive and partial:
        raise Mistake(f"--partial needs a folder of files, and {path} is an archive. Unpack it, and give the folder.")
    names = [*dataset.files, *filter(None, [dataset.vocab_file]), *(part.name for part in dataset.substitutes.values())]
    if path is not None and path.is_dir():
        yield _files_in(path, names)
    elif path is not None and not archive:
        only = len(dataset.files) == 1 and _plain_name(path) not in names
        yield {next(iter(dataset.files)) if only else _plain_name(path): path}
    else:
        downloads = cache_folder() / "downloads" / name
        with explain_write_error(downloads):
            downloads.mkdir(parents=True, exist_ok=True)
        with FileLock(downloads / ".lock"), tempfile.TemporaryDirectory(dir=downloads, prefix="unpacked-") as folder:
            for left in downloads.glob("unpacked-*"):  # left by a process that was killed
                if left != Path(folder):
                    shutil.rmtree(left, ignore_errors=True)
            if path is None:
                yield _download_all(dataset, downloads, Path(folder))
            else:
                wanted = {file: known.bytes for file, known in dataset.files.items() if file != dataset.vocab_file}
                yield unpack(path, wanted, Path(folder))


def _download_all(dataset: Dataset, downloads: Path, folder: Path) -> dict[str, Path]:
    """Download every file of a corpus, in the first way that works."""
    failures = []
    for packages in dataset.packages:
        found: dict[str, Path] = {}
        try:
            for package in packages:
                path = download(package.origins, downloads, check=partial(_why_refused, dataset, package, folder))
                found |= _unpack_package(dataset, package, folder, path)
        except (OSError, ValueError) as error:
            failures.append(str(error))
        else:
            return found
    raise OSError(" ".join(failures))


def _unpack_package(dataset: Dataset, package: Package, folder: Path, path: Path) -> dict[str, Path]:
    """The files of a package: the file itself, or those in its archive."""
    name, sizes = path.name.removesuffix(".part"), {file: dataset.files[file].bytes for file in package.files}
    return {name: path} if name in sizes else unpack(path, sizes, folder)


def _why_refused(dataset: Dataset, package: Package, folder: Path, path: Path) -> str:
    """The reason why a package is not the published one; empty if it is."""
    try:
        for file, there in _unpack_package(dataset, package, folder, path).items():
            _verify(file, there, dataset.files[file])
    except ValueError as error:
        return str(error)
    return ""


def _files_in(folder: Path, names: list[str]) -> dict[str, Path]:
    """The paths of files with these names in or below a folder; a plain file goes before a compressed one."""
    wanted = {f"{name}{suffix}": name for name in names for suffix in ("", *OPENERS)}
    found: dict[str, Path] = {}
    for paths in (folder.iterdir(), folder.rglob("*")):
        for path in sorted(path for path in paths if path.name in wanted and path.is_file()):
            found.setdefault(wanted[path.name], path)
        if len(found) == len(names):
            break
    return found


def _plain_name(path: Path) -> str:
    """The name of a file without the ending of compression."""
    return path.name.removesuffix(path.suffix) if path.suffix in OPENERS else path.name
