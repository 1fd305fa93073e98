"""Byte-level byte-pair encoding: convert any text to ids of subwords, and back to the same bytes.

A tokenizer is JSON of the `tokenizers` library, made by `train_bpe` or another program; `subwords` encodes with it. The
ids of one made here do not change if the text is cut at a border: between words, after a printable ASCII character and
before a space and a letter. Text without borders is cut every 16 KB, between characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32

from ..mistake import Mistake, shortened

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BORDER = re.compile(r"(?<=[!-~])(?= [A-Za-z])")
_LAST_BORDER = re.compile(rb".*[!-~](?= [A-Za-z])", re.DOTALL)
_SLICE, _BATCH, _WORD = 1 << 14, 64, 1 << 10
"""Maximum bytes of a slice, slices of a batch, and characters of a part of a long word. Text without a border, such as
Chinese or DNA, is cut into slices too, because the library takes 130 bytes of memory for each of its bytes."""
_PARTS, _LONG = 1 << 12, 50
"""Maximum number of parts of long words, of `_WORD` characters, in which pairs are counted, because the library keeps
each word and needs 60 times its size; and the mean length from which on words are long, in characters."""
_LARGEST_ID = 1 << 24
"""Limit on ids. The library allocates memory for all ids up to the largest, and aborts if that fails."""


def _byte_characters() -> dict[str, int]:
    """GPT-2's mapping from characters to bytes. Printable bytes map to themselves, the others follow U+0100 in turn."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(shown))
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


CHARACTERS = _byte_characters()


def train_bpe(texts: Iterable[str], size: int, whole: Sequence[str] = ()) -> str:
    """Train a tokenizer of at most `size` tokens on `texts`, and return its JSON. Tokens are 256 bytes, then pairs.

    Each text in `whole` is one token, which never becomes part of a pair. A newline is always a separate token. The
    same texts give the same JSON.
    """
    tokenizers = _library()
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    lines = tokenizers.pre_tokenizers.Split("\n", "isolated")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([lines, byte_level(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=byte_level.alphabet(), special_tokens=list(whole), show_progress=False
    )
    with _library_errors():
        tokenizer.train_from_iterator(_for_pairs(texts), trainer)
    return tokenizer.to_str()


def renumber(content: str, order: Sequence[int]) -> str:
    """The same tokenizer, in which the token with id `order[i]` gets id i."""
    tokenizer = load_tokenizer(content)
    settings, ids = json.loads(tokenizer.to_str()), tokenizer.get_vocab()
    assert sorted(order) == sorted(ids.values()), "order must name every id once"
    new_ids = {old: new for new, old in enumerate(order)}
    # List added tokens among the others too; otherwise the library would number them last.
    symbols = sorted(ids, key=lambda symbol: new_ids[ids[symbol]])
    settings["model"]["vocab"] = {symbol: i for i, symbol in enumerate(symbols)}
    for token in settings["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    settings["added_tokens"].sort(key=lambda token: token["id"])
    return json.dumps(settings, ensure_ascii=False, separators=(",", ":"))


def last_cut(text: bytes | bytearray) -> int:
    """The last position at which `text` can be cut; 0 if there is none. `text` begins at a cut and may continue. Cuts
    are at borders and, after the last border, at the next character every 16 KB."""
    cut = _last_border(text, 0, len(text) - 2)
    while (after := next_character(text, cut + _SLICE)) < len(text):
        cut = after
    return cut


def _last_border(text: bytes | bytearray, start: int, end: int) -> int:
    """The last border after `start` and not after `end`; `start` if there is none."""
    found = _LAST_BORDER.match(text, start, end + 2)
    return found.end() if found else start


def next_character(text: bytes | bytearray, position: int) -> int:
    """Where the first character begins, at or after `position`; the end of the text if there is none."""
    while position < len(text) and text[position] & 0xC0 == 0x80:
        position += 1
    return min(position, len(text))


def encoded(tokenizer: Tokenizer, parts: Iterator[str]) -> Iterator[Int32[np.ndarray, " _"]]:
    """The ids of each part of a text."""
    while batch := list(islice(parts, _BATCH)):
        with _library_errors():
            encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        yield from (np.array(encoding.ids, np.int32) for encoding in encodings)


def slices(text: bytes) -> Iterator[str]:
    """A text cut where it may be cut, into parts of at most about 16 KB."""
    start = 0
    while start < len(text):
        end = next_character(text, start + _SLICE)
        if end < len(text) and (last := _last_border(text, start, start + _SLICE)) > start:
            end = last
        yield text[start:end].decode()
        start = end


def _for_pairs(texts: Iterable[str]) -> Iterator[str]:
    """The slices in which pairs are counted. One without a border is cut into short parts, because counting takes time
    quadratic in a word; of the parts with long words, at most `_PARTS` are counted, at equal distances in the text."""
    kept: list[str] = []
    seen, stride = 0, 1
    for piece in (piece for text in texts for piece in slices(text.encode())):
        if len(piece.encode()) < _SLICE or BORDER.search(piece):
            yield piece
            continue
        for part in (piece[start : start + _WORD] for start in range(0, len(piece), _WORD)):
            if len(part) < _LONG * len(part.split()):
                yield part
                continue
            if seen % stride == 0:
                kept.append(part)
            seen += 1
        if len(kept) > _PARTS:
            kept, stride = kept[::2], 2 * stride
    yield from kept


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise Mistake(
            "Subwords must have the tokenizers library, which is not installed. "
            "Run `pip install tokenizers`, or choose another unit."
        ) from error
    return tokenizers


def load_tokenizer(content: str) -> Tokenizer:
    library = _library()
    with _library_errors():
        json.loads(content, parse_int=_checked_number)
        return library.Tokenizer.from_str(content)


@contextmanager
def _library_errors() -> Iterator[None]:
    """Turn an error of the library into a sentence."""
    try:
        yield
    except BaseException as error:  # the library raises no narrower class, and its panics are not Exceptions
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        reason = shortened(str(error)).rstrip(".")
        raise Mistake(f"The tokenizer must be a tokenizer.json of the tokenizers library: {reason}.") from error


def _checked_number(number: str) -> int:
    if len(number) > 8 or int(number) > _LARGEST_ID:
        raise Mistake(f"it has the number {number[:20]}, and ids are at most {_LARGEST_ID:,}")
    return int(number)


def bytes_of(symbol: str) -> bytes | None:
    """The bytes of a token written in GPT-2's characters; None if it contains another character."""
    return bytes(map(CHARACTERS.__getitem__, symbol)) if CHARACTERS.keys() >= set(symbol) else None
