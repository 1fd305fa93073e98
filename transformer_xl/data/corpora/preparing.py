"""`prepare`, the work of `txl data`: convert a published corpus, downloaded or local, to a token store.

It refuses content or counts that differ from the published ones.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from ... import __version__
from ...config.settings import Newlines
from ...mistake import Mistake, listing
from ...runtime.files import explain_write_error, read_errors, wait_for
from ..corpus import SPLITS, Corpus, Header
from ..datasets import cache_folder, dataset_of, store_folder
from ..reading import Span, Text, expand_home, open_file, pieces, plain_name, read_file
from ..vocab import Vocab
from .archive import unpack_if_archive
from .published import DATASETS, Dataset, DownloadSource


def prepare(name: str, source: str | Path | None = None, *, newlines: Newlines | None = None) -> Corpus:
    """Tokenise the published corpus `name` into the cache.

    Args:
        source: a folder with its files, an archive of them, or its file if it has just one; compressed (.xz, .gz, .bz2)
            or plain. None downloads it.
        newlines: the treatment of line ends; None is the published one. Each treatment has a separate store.

    Raises:
        ValueError: content or counts differ from the published ones.
        OSError: a file is missing, cannot be read or cannot be downloaded.
    """
    dataset = dataset_of(name, newlines)
    unit, newlines = dataset.unit, newlines or dataset.newlines
    with _source_files(name, source) as found:
        texts = _choose_texts(dataset, found)
        words = found.get(dataset.vocab_file)
        try:
            if words is None:
                counted = (piece for split in dataset.counted for text in texts[split] for piece in pieces(text, unit))
                vocab = Vocab.build(unit, counted, newlines=newlines, closed=True)
            else:
                vocab = Vocab.read(read_file(words), str(words), newlines=newlines)
            check = partial(_check_counts, dataset.protocols[newlines])
            return Corpus.build(store_folder(name, newlines), texts, name=name, vocab=vocab, check=check)
        except UnicodeDecodeError as error:
            raise Mistake(f"A file of {name} is not the published one: it is not UTF-8 text ({error}).") from error


def _choose_texts(dataset: Dataset, found: Mapping[str, Path]) -> dict[str, list[Text]]:
    """Verify the files found, and choose the texts of each split."""
    if missing := [file for file in dataset.files if file not in found]:
        raise FileNotFoundError(
            f"--source must hold {listing([*dataset.files], 4)}, and lacks {listing(missing, 4)}. Give a whole copy, "
            "leave out --source to download all, or train on the files that there are by --data."
        )
    for name, published in dataset.files.items():
        algorithm, _, digest = published.partition(":")
        with read_errors(found[name]), open_file(found[name]) as opened:
            own = hashlib.file_digest(opened, algorithm).hexdigest() if digest else ""  # type: ignore[arg-type]
        if own != digest:
            raise Mistake(
                f"{found[name]} is not the published {name}: its content has {algorithm.upper()} {own}, and must have "
                f"{digest}. Download it again."
            )
    if dataset.cuts:
        first, second = dataset.cuts
        text = read_file(next(iter(found.values())))
        return {"train": [text[:first]], "valid": [text[first:second]], "test": [text[second:]]}
    splits = dataset.splits or {split: (file,) for split, file in zip(SPLITS, dataset.files, strict=True)}
    if dataset.spelling:
        return {split: [dataset.spelling(read_file(found[file])) for file in splits[split]] for split in splits}
    return {split: [Span(found[file]) for file in splits[split]] for split in splits}


def _check_counts(published: Mapping[str, int], header: Header) -> None:
    """Refuse a corpus whose counts differ from the published ones."""
    own = header.counts
    wrong = [f"{own[what]:,} {what}, not {count:,}" for what, count in published.items() if own[what] != count]
    if wrong:
        raise Mistake(f"{header.name} has {'; '.join(wrong)}. Its files are not the published ones.")


@contextmanager
def _source_files(name: str, source: str | Path | None) -> Iterator[dict[str, Path]]:
    """Yield the available files of a corpus by published name. Unpacked files are removed afterwards."""
    dataset = DATASETS[name]
    downloads = cache_folder() / "downloads" / name
    if source is not None:
        paths = [expand_home(source)]
        if not (paths[0].is_dir() or paths[0].is_file()):
            raise FileNotFoundError(
                f"--source must be a folder, an archive or a file, and {paths[0]} is missing, a pipe or a device."
            )
    else:
        with wait_for(downloads / ".lock", f"downloading to {downloads}"):
            paths = list(dict.fromkeys(download(origins, downloads) for origins in dataset.downloads))
    names = list(dataset.files)
    found: dict[str, Path] = {}
    with ExitStack() as stack:
        for path in paths:
            found |= _files_in(stack.enter_context(unpack_if_archive(path, downloads)), names)
        if len(dataset.files) == 1 and not found and paths[0].is_file():
            found = {names[0]: paths[0]}  # a file of any name
        yield found


def _files_in(place: Path, names: Sequence[str]) -> dict[str, Path]:
    """The paths of files with these names: `place` itself, or files in or below the folder `place`.

    Of two files with a name, the one nearer to the folder is taken, and a plain one before a compressed one.
    """
    paths = place.rglob("*") if place.is_dir() else [place]
    found: dict[str, Path] = {}
    for path in sorted(paths, key=lambda path: (len(path.parts), path)):
        if plain_name(path) in names and path.is_file():
            found.setdefault(plain_name(path), path)
    return found


def download(origins: Sequence[DownloadSource], folder: Path) -> Path:
    """Download a file to `folder` from the first origin that works. If it is there already, no network is needed.

    Each origin is tried three times.

    Raises:
        OSError: a sentence with every address and the reason.
    """
    import pooch  # not above, because `txl --help` needs no network
    from requests.exceptions import RequestException

    pooch.get_logger().setLevel("WARNING")
    loader = pooch.HTTPDownloader(timeout=30, headers={"User-Agent": f"transformer-xl/{__version__}"})
    reasons = []
    for origin in sorted(origins, key=lambda origin: not (folder / origin.name).is_file()):
        path = folder / origin.name
        if not path.is_file():
            size = "" if origin.bytes is None else f" ({origin.bytes:,} bytes)"
            print(f"Loading {origin.url}{size}.", file=sys.stderr, flush=True)
        registry, urls = {path.name: origin.digest}, {path.name: origin.url}
        files = pooch.create(folder, "", registry=registry, urls=urls, retry_if_failed=2)
        try:
            with explain_write_error(path):
                files.fetch(path.name, downloader=loader)  # type: ignore[arg-type] - a class of its own
            return path
        except (RequestException, ValueError) as error:
            path.unlink(missing_ok=True)
            reasons.append(f"{origin.url} ({str(error).rstrip('.')})")
            print(f"{reasons[-1]}: this address is given up.", file=sys.stderr, flush=True)
    raise OSError(
        f"{origins[0].name} could not be downloaded from {', nor from '.join(reasons)}: give --source a copy that was "
        "downloaded by other means."
    )
