"""Read files of token ids that another program made, each by the evidence of its format.

| file | ids | documents |
|---|---|---|
| `.npy`, `.npz` of one array | any integers | with two dimensions, the rows |
| `.bin` with an `.idx` beside it (Megatron) | as the index says | as the index says |
| `.bin` with the header of llm.c or modded-nanogpt | uint16, or uint32 for Llama 3 | |
| other `.bin` | what a `.json` beside it says (`{"dtype": "uint32"}`), else uint16 (nanoGPT) | |
| `.json`, `.jsonl` | lists under "ids", "input_ids" or "tokens" (MidiTok) | each list |

Large files are memory-mapped, and nothing is unpickled: NumPy refuses arrays of objects, and a `meta.pkl` stays closed.
"""

from __future__ import annotations

import hashlib
import json
import struct
import tokenize
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer

from ..mistake import Mistake, shortened
from ..runtime.files import digest_of, plain_file, read_errors, read_table, unpack_limit
from .reading import LONGEST, Span, Text, lines_of

SUFFIXES = (".npy", ".npz", ".bin", ".json", ".jsonl")
MOST_IDS = 1 << 20
"""Limit on the size of a vocabulary: far above those of tokenizers, and far below ids that are no tokens."""
_BLOCK = 1 << 20
"""Number of ids to read at a time."""
_DAMAGE = (ValueError, TypeError, OverflowError, RecursionError, MemoryError, zipfile.BadZipFile)
_DAMAGE += (SyntaxError, tokenize.TokenError, struct.error, NotImplementedError)
"""What NumPy raises for a damaged file; it reads a header as Python."""
_LLM_C = {20240520: "<u2", 20240801: "<u4"}
"""The first number of a file of llm.c, and the type of its ids after 1,024 bytes
(https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py)."""
_MEGATRON = b"MMIDIDX\0\0"
_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""The types of Megatron's ids
(https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py)."""
_WORDS = {"uint8": "u1", "uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8", "uint64": "<u8"}
_KEYS = ("ids", "input_ids", "tokens")
_SAMPLE, _FEW = 1 << 20, 16
"""If every second one of the first 2^20 numbers of 16 bits is below 16, they may be numbers of 32 or 64 bits."""


class Ids(NamedTuple):
    """The ids of a file."""

    ids: Integer[np.ndarray, " N"]
    starts: Integer[np.ndarray, " D"] | None = None
    """The position of each document's first id; None if the file is one document."""

    @property
    def borders(self) -> Integer[np.ndarray, " N"]:
        """Where the file may be cut: before each document, and at the end."""
        return np.append(self.starts if self.starts is not None else np.arange(0), len(self.ids))

    def digest(self, file: Path) -> str:
        """SHA-256 of the file, and what files beside it say: the type of ids, and documents."""
        starts = b"" if self.starts is None else np.asarray(self.starts).tobytes()
        return f"{digest_of(file)} {self.ids.dtype.str} {hashlib.sha256(starts).hexdigest()}"


def read_ids(file: Path) -> Ids:
    """The ids in a file.

    Raises:
        Mistake: the file is of another format, is damaged, or holds anything but integers.
    """
    beside = (file.with_suffix(".idx"), *_words_beside(file))
    facts = [each.stat() for each in (plain_file(file), *beside) if each.is_file()]
    return _read(file, facts[0].st_size, tuple((each.st_size, each.st_mtime_ns) for each in facts))


@lru_cache(maxsize=8)
def _read(file: Path, size: int, _: object) -> Ids:
    if file.suffix not in SUFFIXES:
        raise Mistake(f"{file} must be a {', '.join(SUFFIXES)} file, because the tokens are ids. Name another.")
    if not size:
        return Ids(np.zeros(0, "<u2"))
    if file.suffix == ".bin":
        return _read_bin(file, size)
    if file.suffix in (".json", ".jsonl"):
        return _of_lists(file)
    with read_errors(file, "Save its integers again.", *_DAMAGE):
        ids = _read_npz(file) if file.suffix == ".npz" else np.lib.format.open_memmap(file, mode="r")
    if isinstance(ids, np.memmap) and ids.offset + ids.nbytes != size:
        more = size - ids.offset - ids.nbytes
        raise Mistake(f"{file} must end with its array, and has {more:,} bytes more. Save the ids as one array.")
    if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
        raise Mistake(
            f"{file} must hold an array of integers with one dimension, or two, whose rows are documents; got "
            f"{ids.ndim} dimensions of {ids.dtype}. Save the ids of one stream."
        )
    return Ids(ids) if ids.ndim == 1 else Ids(ids.reshape(-1), np.arange(len(ids)) * ids.shape[1])


def _read_npz(file: Path) -> np.ndarray:
    """The only array of the file."""
    with zipfile.ZipFile(file) as packed:
        sizes = [each.file_size for each in packed.infolist()]
        if len(sizes) != 1 or sizes[0] > unpack_limit(file):
            raise Mistake(
                f"{file} must hold one array of at most {unpack_limit(file):,} bytes, and holds {len(sizes)}, of "
                f"{sum(sizes):,}. Save the ids as .npy."
            )
        with packed.open(packed.namelist()[0]) as opened:
            return np.lib.format.read_array(opened, allow_pickle=False)


def _read_bin(file: Path, size: int) -> Ids:
    index = file.with_suffix(".idx")
    if index.exists():
        return _read_megatron(file, size, index)
    with file.open("rb") as opened:
        head = opened.read(12)
    magic, _, count = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
    if magic in _LLM_C:
        kind = np.dtype(_LLM_C[magic])
        if size != 1024 + count * kind.itemsize:
            raise Mistake(f"{file} must hold {count:,} ids, as its header says, and has {size:,} bytes. Get it again.")
        return Ids(np.memmap(file, kind, "r", 1024))
    word = _word_beside(file)
    kind = np.dtype(_WORDS[word or "uint16"])
    if size % kind.itemsize:
        raise Mistake(
            f"{file} must hold {kind.name} ids, of {kind.itemsize} bytes each, and has {size:,} bytes. Write it again, "
            f'or say its type in {file.stem}.json: {{"dtype": "uint32"}}.'
        )
    ids = np.memmap(file, kind, "r")
    if not word and len(ids) % 2 == 0 and int(ids[1:_SAMPLE:2].max()) < _FEW:
        raise Mistake(
            f"{file} may hold uint16 ids or wider ones, as every second number is below {_FEW}. Say which in "
            f'{file.stem}.json beside it, {{"dtype": "uint32"}}, or save the ids as .npy.'
        )
    return Ids(ids)


def _words_beside(file: Path) -> tuple[Path, Path]:
    return file.with_suffix(".json"), file.with_name("meta.json")


def _word_beside(file: Path) -> str:
    """The type that `NAME.json` or `meta.json` beside a file gives; "" if there is none."""
    for beside in _words_beside(file):
        if beside.is_file():
            word = read_table(beside, "Write it again.", dtype=str).get("dtype", "")
            if word and word not in _WORDS:
                raise Mistake(f'{beside} must have a "dtype" of {", ".join(_WORDS)}, got {shortened(repr(word))}.')
            return word
    return ""


def _read_megatron(file: Path, size: int, index: Path) -> Ids:
    """Ids by Megatron's index: a head, then for each sequence its size and offset, then each document's sequence."""
    raw = np.memmap(plain_file(index), "u1", "r") if index.stat().st_size >= 34 else np.zeros(34, "u1")
    magic, version, code, sequences, documents = struct.unpack("<9sQBQQ", raw[:34].tobytes())
    if magic != _MEGATRON or version != 1 or len(raw) != 34 + 12 * sequences + 8 * documents:
        raise Mistake(f"{index} must be an index of Megatron (version 1), and is not. Get both files again.")
    if code not in _CODES:
        raise Mistake(f"{index} must be of integers, and its type has the number {code}. Save the ids as .npy.")
    sizes = raw[34 : 34 + 4 * sequences].view("<i4").astype("i8")
    offsets = raw[34 + 4 * sequences : 34 + 12 * sequences].view("<i8")
    firsts = raw[34 + 12 * sequences :].view("<i8")
    kind, ends = np.dtype(_CODES[code]), np.append(0, sizes.cumsum())
    sound = (sizes >= 0).all() and np.array_equal(offsets, ends[:-1] * kind.itemsize)
    inside = (firsts >= 0).all() and (firsts <= sequences).all()
    if not sound or not inside or ends[-1] * kind.itemsize != size:
        raise Mistake(f"{index} must describe {file.name}, and its sizes are others. Get both files again.")
    starts = np.unique(ends[firsts])
    return Ids(np.memmap(file, kind, "r") if size else np.zeros(0, kind), starts[starts < ends[-1]])


def _lists(file: Path) -> Iterator[list[Any]]:
    """The lists of a JSON file, or of each line of JSON lines. A list of lists is several."""
    if file.suffix == ".json" and file.stat().st_size > LONGEST:
        raise Mistake(f"{file} must be at most {LONGEST:,} bytes. Save the ids as .npy, or as JSON lines.")
    whole = enumerate(lines_of(Span(file)), start=1) if file.suffix == ".jsonl" else [(1, file.read_bytes())]
    for number, line in whole:
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Mistake(
                f"{file}, line {number:,}, must be JSON: {shortened(str(error))}. Mend or remove it."
            ) from error
        found = next((content[key] for key in _KEYS if key in content), None) if isinstance(content, dict) else content
        if not isinstance(found, list):
            raise Mistake(f'{file}, line {number:,}, must be an object with a list "ids", "input_ids" or "tokens".')
        yield from found if found and all(isinstance(each, list) for each in found) else [found]


def _of_lists(file: Path) -> Ids:
    arrays = [np.zeros(0, "i8")]
    for each in _lists(file):
        if not all(type(number) is int and abs(number) < 1 << 63 for number in each):
            raise Mistake(f"{file} must hold lists of integers, got {shortened(repr(each))}. Save the ids as .npy.")
        arrays.append(np.array(each, "i8"))
    ends = np.cumsum(list(map(len, arrays)))
    return Ids(np.concatenate(arrays), np.unique(ends[:-1][ends[:-1] < ends[-1]]))


def document_starts(text: Text) -> Integer[np.ndarray, " D"]:
    """The positions in a span of ids at which its documents begin."""
    assert isinstance(text, Span), "ids are in a file"
    found = read_ids(text.file)
    end = len(found.ids) if text.end is None else text.end
    borders = found.borders
    return np.append(0, borders[(borders > text.start) & (borders < end)] - text.start)


def id_blocks(text: Span, vocab_size: int, end: int | None = None) -> Iterator[Integer[np.ndarray, " n"]]:
    """The ids of a span of a file, about a million at a time. Positions of the span count ids. The id `end`, if given,
    is added after each document that does not end with it.

    Raises:
        Mistake: an id is negative, or is not below `vocab_size`.
    """
    ids = read_ids(text.file).ids[text.start : text.end]
    borders = np.append(document_starts(text)[1:], len(ids)) if end is not None else np.zeros(0, np.int64)
    for start in range(0, len(ids), _BLOCK):
        block = ids[start : start + _BLOCK]
        if block.min() < 0 or block.max() >= vocab_size:
            at = int(((block < 0) | (block >= vocab_size)).argmax())
            larger = ", or train with a larger model.vocab_size" if block[at] > 0 else ""
            raise Mistake(
                f"{text.file} must hold ids from 0 to {vocab_size - 1:,}, the vocabulary's, got {block[at]} as number "
                f"{text.start + start + at:,} from 0. Give ids of the same tokenizer{larger}."
            )
        if end is not None:
            inside = borders[(borders > start) & (borders <= start + len(block))] - start
            block = np.insert(block.astype(np.int64), inside[block[inside - 1] != end], end)
        yield block
