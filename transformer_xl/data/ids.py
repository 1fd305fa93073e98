"""Read files of token ids that another program made: `.npy` of NumPy, and nanoGPT's `.bin`, raw little-endian uint16.

Files are memory-mapped, and nothing is unpickled: NumPy refuses arrays of objects, and a `meta.pkl` stays closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from ..config.recipe import ID_FILES
from ..mistake import Mistake, shortened
from ..runtime.files import plain_file
from .formats import refuse_other_ids
from .reading import Span, Text

MOST_IDS = 1 << 20
"""Limit on the size of a vocabulary: far above those of tokenizers, and far below ids that are no tokens."""
_BLOCK = 1 << 20
"""Number of ids to read at a time."""
_DAMAGE = (ValueError, TypeError, OverflowError, EOFError, RecursionError, MemoryError)
"""What NumPy raises for a damaged header."""


def read_ids(file: Path) -> Integer[np.ndarray, " N"]:
    """The ids in a file, memory-mapped.

    Raises:
        Mistake: the file is of another format, is damaged, or holds anything but a one-dimensional array of integers.
    """
    size = plain_file(file).stat().st_size
    if file.suffix not in ID_FILES:
        raise Mistake(f"{file} must be a .npy or .bin file, because the tokens are ids. Name another, or a folder.")
    if not size:
        return np.zeros(0, "<u2")
    if file.suffix == ".bin":
        if size % 2:
            raise Mistake(f"{file} must hold uint16 ids, of 2 bytes each, and has {size:,} bytes. Write it again.")
        raw = np.memmap(file, "<u2", "r")
        refuse_other_ids(file, raw)
        return raw
    try:
        ids = np.lib.format.open_memmap(file, mode="r")
    except _DAMAGE as error:
        reason = shortened(str(error)).rstrip(".") or type(error).__name__
        raise Mistake(f"{file} must be a .npy file of integers, and is not sound: {reason}. Save it again.") from error
    if ids.offset + ids.nbytes != size:
        more = size - ids.offset - ids.nbytes
        raise Mistake(f"{file} must end with its array, and has {more:,} bytes more. Save the ids as one array.")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise Mistake(
            f"{file} must hold a one-dimensional array of integers, got {ids.ndim} dimensions of {ids.dtype}. Save the "
            "ids of one stream."
        )
    return ids


def id_blocks(text: Text, vocab_size: int) -> Iterator[Integer[np.ndarray, " n"]]:
    """The ids of a span of a file, about a million at a time. Positions of the span count ids.

    Raises:
        Mistake: an id is negative, or is not below `vocab_size`.
    """
    assert isinstance(text, Span), "ids are in a file"
    ids = read_ids(text.file)[text.start : text.end]
    for start in range(0, len(ids), _BLOCK):
        block = ids[start : start + _BLOCK]
        if block.min() < 0 or block.max() >= vocab_size:
            at = int(((block < 0) | (block >= vocab_size)).argmax())
            raise Mistake(
                f"{text.file} must hold ids from 0 to {vocab_size - 1:,}, the vocabulary's, got {block[at]} as number "
                f"{text.start + start + at:,} from 0. Give ids of the same tokenizer, or train with a larger "
                "model.vocab_size."
            )
        yield block


def largest_id(texts: Iterable[Span]) -> int:
    """The largest id of some texts. Raises `Mistake` for one above any vocabulary."""
    return max(int(block.max()) for text in texts for block in id_blocks(text, MOST_IDS))
