"""Divide any text into splits: choose the files of a folder that are text, their splits, and the cuts between splits.

Token ids (unit "id") are divided in the same way. Positions count bytes of a text, and ids of a file of ids.

Texts stay on disk. This module finds their sizes, their checksums and the positions of the cuts.
"""

from __future__ import annotations

import hashlib
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ..config.settings import Unit
from ..mistake import Mistake, listing, printable
from ..runtime.files import digest_of, read_errors
from .corpus import SPLITS, WHOLE
from .ids import SUFFIXES, read_ids
from .reading import WHITE, Span, chunks, documents, has_documents, is_jsonl, lines_of, open_file, parts
from .subwords import next_character
from .tables import is_table, row_texts

NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev", "devel", "development"),
    "test": ("test", "testing"),
}
"""The words that name a split in names of files and folders."""
_SPLIT_OF = {name: split for split, names in NAMES.items() for name in names}
_CODE = (
    *(".py", ".pyi", ".pyx", ".ipynb", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".js", ".jsx", ".ts", ".tsx", ".java"),
    *(".kt", ".go", ".rs", ".rb", ".php", ".pl", ".sh", ".lua", ".jl", ".r", ".scala", ".swift", ".cs", ".m", ".sql"),
    *(".html", ".css", ".toml", ".yaml", ".yml", ".cfg", ".ini"),
)
"""Suffixes of source code, whose file names do not name splits: test.py is a test."""
_ABOUT = ("readme", "license", "licence", "notice", "copying", "changelog", "authors", "citation")
"""Prefixes of names of files that describe a text. Such a file is left out if other files name splits."""
_SAVED = ("dataset_info.json", "state.json", "dataset_dict.json")
"""What `save_to_disk` of the library datasets writes beside its `.arrow` files."""
_HEAD = 1 << 13
"""A file is binary if there is a NUL in this number of first bytes."""
_FORMATS = (b"\x1f\x8b", b"BZh91AY&SY", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf\x27\x1c")
_FORMATS += (b"PAR1", b"ARROW1", b"\x93NUMPY", b"\x89HDF\r\n", b"SQLite format 3\0", b"GGUF")
_FORMATS += (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"%PDF-")
"""The first bytes of packed files, and of tables, arrays, models, pictures and documents: their bytes are no text."""
_TOKENS = re.compile(rb'\s*\{\s*"(?:ids|input_ids|tokens)"\s*:\s*\[')
"""How a file of token ids begins, which is no text."""
_WINDOW = 1 << 20
"""Number of bytes in which to search for a position to cut words."""


class Texts(NamedTuple):
    """The texts of each split, and notes for the user."""

    splits: dict[str, list[Span]]
    notes: list[str]
    """Sentences: the files of each split, and the files left out with the reasons."""
    digest: str
    """SHA-256 of all texts and the positions at which they are cut."""
    documents: bool
    """Whether the texts are JSON lines, each of which starts with an empty memory."""
    check: Callable[[object], None]
    """Refuses files that changed since they were read here: call it when all has been read again."""


@dataclass(frozen=True)
class _File:
    """A text file, with the facts from reading it once."""

    name: str
    text: Span
    size: int
    """Bytes of its text, or ids. For words, the end of the last line counts even if it is missing."""
    digest: str
    documents: bool
    """Whether it has several documents, which are not cut."""


def _facts(file: Path) -> tuple[int, ...]:
    """What changes when a file is written."""
    with read_errors(file):
        found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_splits(path: Path, unit: Unit, *, whole: bool = False, column: str = "") -> Texts:
    """The texts of each split of a file or folder.

    The name of a file, or of its folder, gives its split (`NAMES`). A single file is cut 90 : 5 : 5 by position, JSON
    lines between two lines. If no file of a folder names a split, they are joined in the order of their names and cut
    in the same way. With `whole`, texts that name no split are the one split "all".

    Raises:
        ValueError: there is too little text, it does not suit `unit`, it has several formats, or the split of a file is
            unclear.
    """
    skipped: dict[str, str] = {}
    files = _files(path, skipped, unit) if path.is_dir() else {path.name: path}
    _leave_one_format(path, files, skipped, unit, column)
    before = {file: _facts(file) for file in files.values()}
    found = [each for name, file in files.items() if (each := _read_once(file, name, unit, column)).size]
    skipped |= dict.fromkeys(sorted(files.keys() - {each.name for each in found}), "empty")
    named = _files_by_split(path, found, skipped) if path.is_dir() else {}
    lines = any(each.documents for each in found)
    splits, how = _make_splits(named or {WHOLE: found}, unit, whole=whole)
    reasons = [f"{name} ({reason})" for name, reason in skipped.items()]
    left_out = [f"Left out: {listing(reasons, 5)}."] if skipped else []
    for split, texts in splits.items():
        if not texts:
            sentence = (
                f"{path} has nothing for the {split} split: it is empty, or too short to be cut between documents, "
                "words or characters. Give more, or a file for each split."
            )
            raise Mistake(" ".join([sentence, *left_out]))
    digests = {each.text.file: each.digest for each in found}
    cuts = [(split, [(digests[t.file], t.start, t.end) for t in texts]) for split, texts in splits.items()]
    notes = list(map(printable, (f"{how}.", *left_out)))
    identity = repr(("lines", cuts) if lines else cuts)

    def check(_: object) -> None:
        for file in before:
            if _facts(file) != before[file]:
                raise Mistake(f"{file} changed while it was read. Run this again when it is complete.")

    return Texts(splits, notes, hashlib.sha256(identity.encode()).hexdigest(), lines, check)


def _make_splits(given: dict[str, list[_File]], unit: Unit, *, whole: bool) -> tuple[dict[str, list[Span]], str]:
    """The splits, and a sentence about them.

    They are the `given` ones, but a text without splits is cut, and a missing valid split is cut from train.
    """
    parts = {split: [each.text for each in found] for split, found in given.items()}
    cut, wanted = (WHOLE, SPLITS) if WHOLE in given else ("train", SPLITS[:2])
    if (whole and cut == WHOLE) or (cut == "train" and ("train" not in given or "valid" in given)):
        return parts, _describe(given)
    found = given[cut]
    total = sum(each.size for each in found)
    cuts = [_cut_position(found, total * share // 20, unit, total // 40) for share in range(21 - len(wanted), 20)]
    parts |= _cut_files(found, wanted, cuts)
    shares = "cut 90 : 5 : 5" if cut == WHOLE else "valid is the last 5 % of train, as no file names it"
    how = f"{_describe(given)}; {shares}".replace(f"{cut}:", f"{', '.join(wanted)}:", 1)
    return {split: parts[split] for split in SPLITS if split in parts}, how


def _files(folder: Path, skipped: dict[str, str], unit: Unit) -> dict[str, Path]:
    """The files that begin like text, or whose names are those of ids, in the order of their names.

    Other files, hidden files, and folders that this package wrote are added to `skipped`.
    """
    files: dict[str, Path] = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if any(above.as_posix() in skipped for above in name.parents):
            continue
        if reason := _no_text(file, unit):
            skipped[name.as_posix()] = reason
        elif file.is_file():
            files[name.as_posix()] = file
    return files


def _leave_one_format(path: Path, files: dict[str, Path], skipped: dict[str, str], unit: Unit, column: str) -> None:
    """Move the files that describe JSON lines from `files` to `skipped`; refuse other texts beside JSON lines, and ids
    of two formats."""
    kinds = {name: ".jsonl" if is_jsonl(file) else file.suffix for name, file in files.items()}
    own = {name for name, file in files.items() if unit == "id" or has_documents(file, column)}
    formats = {name: kind if name in own else "text" for name, kind in kinds.items()}
    about = [name for name, kind in formats.items() if kind == "text" and _is_about(name)]
    if own and unit != "id":
        skipped |= dict.fromkeys(about, "no lines or rows")
        for name in about:
            del files[name], formats[name]
    if len(set(formats.values())) > 1:
        first, second = sorted(dict(zip(formats.values(), formats, strict=True)).values())[:2]
        raise Mistake(f"{path} must hold files of one format, got {first} and {second}. Move one kind away.")


def _is_about(name: str) -> bool:
    return name.rpartition("/")[2].lower().startswith(_ABOUT)


def _no_text(file: Path, unit: Unit) -> str:
    """The reason why a file or folder is not text, or not of ids; "" if it may be."""
    if file.name.startswith("."):
        return "hidden"
    if file.is_dir():
        return "a link to a folder" if file.is_symlink() else "written by txl" if _is_output(file) else ""
    if not file.is_file():
        return "not a file"
    if file.name in _SAVED or (file.suffix == ".arrow" and file.name.startswith("cache-")):
        return "beside the data of a dataset"
    if unit == "id":
        about = file.suffix == ".json" and (file.name == "meta.json" or file.with_suffix(".bin").is_file())
        return "" if file.suffix in SUFFIXES and not about else "no ids"
    if is_table(file):
        return ""
    with read_errors(file), open_file(file) as opened:
        head = opened.read(_HEAD)
    return _why_no_text(file, head) or ("binary" if b"\0" in head else "")


def _why_no_text(file: Path, head: bytes) -> str:
    """Why the bytes of a file, which begin with `head`, are not its text; "" if they may be."""
    if file.suffix == ".json" and _TOKENS.match(head):
        return 'a file of token ids, as MidiTok writes them, which corpus.unit = "id" reads'
    pickled = file.suffix in (".pkl", ".pickle", ".pt", ".pth") and head.startswith((b"\x80", b"PK"))
    return "binary" if pickled or head.startswith(_FORMATS) else ""


def _is_output(folder: Path) -> bool:
    """Whether a folder is a run, a checkpoint or a token store."""
    pairs = (("config.toml", "environment.json"), ("model.safetensors", "config.json"), ("corpus.json", "vocab.json"))
    return any((folder / first).is_file() and (folder / second).is_file() for first, second in pairs)


def _read_once(file: Path, name: str, unit: Unit, column: str) -> _File:
    """Read a file once for the size and checksum of its text. Unless `unit` is byte, refuse a file that is not text."""
    if unit == "id":
        found = read_ids(file)
        return _File(name, Span(file), len(found.ids), found.digest(file), found.starts is not None)
    if is_table(file, column):
        rows = sum(1 for _ in row_texts(file, column))
        return _File(name, Span(file, 0, rows, column), rows, digest_of(file), documents=True)
    with read_errors(file), open_file(file) as opened:
        reason = _why_no_text(file, opened.read(_HEAD))
    if reason:
        raise Mistake(
            f"{file} must be text, and is {reason}. Write its text as .txt or JSON lines (.jsonl), give it the suffix "
            'of its format (.gz, .xz, .bz2, .parquet, .arrow), or take corpus.unit = "id" for ids (.npy).'
        )
    for _ in documents(Span(file, column=column)) if is_jsonl(file) else ():
        pass  # refuses a line without text
    digest, start, size, last = hashlib.sha256(), 0, 0, b"\n"
    for part in parts(Span(file), "byte" if unit == "byte" else "char"):
        if unit != "byte":
            _check_utf8(part, size, file)
            if size == 0 and part.startswith(BOM_UTF8):
                start = len(BOM_UTF8)
        digest.update(part if size else part[start:])
        size, last = size + len(part), part[-1:]
    size += (unit == "word" and last != b"\n") - start
    return _File(name, Span(file, start, column=column), size, digest.hexdigest(), is_jsonl(file))


def _check_utf8(part: bytes, position: int, file: Path) -> None:
    """Refuse a part of a file, which begins at `position`, that is not text."""
    try:
        part.decode()
        broken = part.find(b"\0")
    except UnicodeDecodeError as error:
        broken = error.start
    if broken >= 0:
        raise Mistake(
            f"{file} must be UTF-8 text unless the tokens are bytes, and is binary or in another encoding: byte "
            f"{position + broken:,} is 0x{part[broken]:02x}. Convert it, leave it out, or "
            'take corpus.unit = "byte".'
        )


def _files_by_split(folder: Path, found: Sequence[_File], skipped: dict[str, str]) -> dict[str, list[_File]]:
    """The files that name a split, by split; empty if no file names one.

    If all of them name train, they are one text, to be cut.
    """
    named: dict[str, list[_File]] = {}
    others: list[_File] = []
    for each in found:
        splits = _splits_in(each.name)
        if len(splits) > 1:
            raise Mistake(f"{folder / each.name} names {' and '.join(sorted(splits))}. Rename it after one split.")
        (named.setdefault(splits.pop(), []) if splits else others).append(each)
    if not named:
        return {}
    doubtful = [each.name for each in others if not _is_about(each.name)]
    if doubtful and not {"train", "valid"} <= named.keys():
        first = next(named[split][0].name for split in SPLITS if split in named)
        raise Mistake(
            f"{folder} must say which split each file is of: {first} names one, but not {listing(doubtful, 5)}. "
            f"Name all after train, valid and test, move the others away, or rename {first}."
        )
    skipped |= {each.name: "names no split" for each in others}
    if named.keys() == {"train"}:
        return {WHOLE: named["train"]}
    return {split: named[split] for split in SPLITS if split in named}


def _splits_in(name: str) -> set[str]:
    """The splits that a path names.

    These can name a split: a folder's name; a part of the file's name between dots; the first or last word of such a
    part. If none of them does, the first or last word of a folder's name can.
    """
    *folders, file = name.lower().split("/")
    if file.endswith(_CODE):
        return set()
    parts = file.split(".")
    for words in ([*folders, *parts, *_ends(parts)], _ends(folders)):
        if splits := {_SPLIT_OF[word] for word in words if word in _SPLIT_OF}:
            return splits
    return set()


def _ends(names: Sequence[str]) -> list[str]:
    """The first and the last word of each name. Numbers, and "of" as in "1-of-2", are not words."""
    inner = [[word for word in re.split(r"[^a-z]+", name) if word and word != "of"] for name in names]
    return [word for words in inner for word in (*words[:1], *words[-1:])]


def _cut_files(found: Sequence[_File], splits: Sequence[str], cuts: Sequence[int]) -> dict[str, list[Span]]:
    """Join the texts and cut them at these positions."""
    parts: dict[str, list[Span]] = {split: [] for split in splits}
    total = sum(each.size for each in found)
    for split, begin, end in zip(splits, [0, *cuts], [*cuts, total], strict=True):
        first = 0
        for each in found:
            start, stop = max(begin - first, 0), min(end - first, each.size)
            if start < stop:
                to = None if stop == each.size else each.text.start + stop
                parts[split].append(replace(each.text, start=each.text.start + start, end=to))
            first += each.size
    return parts


def _cut_position(found: Sequence[_File], position: int, unit: Unit, near: int) -> int:
    """The first position, at or after this one, at which the joined texts can be cut.

    JSON lines are cut after a line. So are words if a line ends within `near` bytes; a longer search could make the
    next split too short.
    """
    first = 0
    for each in found:
        inside = position - first
        if inside < each.size:
            break
        first += each.size
    else:
        return position
    if unit == "id":
        ids = read_ids(each.text.file)
        return position if ids.starts is None else first + int(ids.borders[ids.borders.searchsorted(inside)])
    text = replace(each.text, start=each.text.start + inside)
    if is_table(text.file, text.column):
        return position
    if is_jsonl(text.file):
        return first + min(inside + len(next(lines_of(text), b"")) + 1, each.size)  # a line end counts
    window = b"".join(chunks(replace(text, end=text.start + min(_WINDOW, each.size - inside))))
    if unit != "word":
        return position + (0 if unit == "byte" else next_character(window, 0))
    cut = window.find(b"\n", 0, near) + 1
    cut = cut or next((end for end, byte in enumerate(window, start=1) if byte in WHITE), len(window))
    return first + (each.size if cut == len(window) else inside + cut)


def _describe(splits: Mapping[str, Sequence[_File]]) -> str:
    """The files of each split."""
    return "; ".join(f"{split}: {listing([each.name for each in found], 5)}" for split, found in splits.items())
