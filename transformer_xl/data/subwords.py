"""Subwords: any tokenizer of the `tokenizers` library, as JSON. It is trained here (byte-level pairs) or by another
program: byte-level pairs, pieces of words as of T5, Llama and BERT, whole words.

The ids of one trained here do not change if the text is cut at a border: between words, after a printable ASCII
character and before a space and a letter. Text without borders is cut every 16 KB, between characters.

A tokenizer that is not byte-level may change a text before it cuts it into tokens: normalise characters, drop line ends
or capitals, or have one token for all that it does not know. What it loses is found by trying, and said. A token stands
for the bytes that it adds after a word, so the joined bytes of a text's ids are the text as the tokenizer writes it,
perhaps after a space. Where a text without borders is cut, it may get a space too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise
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
_BEFORE = "a"
"""What stands before a token, or a part of a text, that is not the first."""
_PROBE = "It is a  cat of 12 mats.\n The dog ran away from them and came back, and the cat ate a fish ."
_LOSSES = {
    "capitals": "Ab",
    "accents": "caf\u00e9",
    "line ends": "a\nb",
    "several spaces": "a  b",
    "spaces before punctuation": "a , b",
    "combining characters": "e\u0301",
    "other scripts": "a \u4e2d",
}
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_characters() -> dict[str, int]:
    """GPT-2's mapping from characters to bytes. Printable bytes map to themselves, the others follow U+0100 in turn."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(shown))
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


CHARACTERS = _byte_characters()


class Subwords:
    """Encodes text with a tokenizer that is given as JSON."""

    symbols: tuple[str, ...]
    """The tokens by id, as the tokenizer writes them."""
    token_bytes: tuple[bytes, ...]
    """The bytes of each token, by id. The joined bytes of a text's ids are the text, but for what is `lost`."""
    unk: int | None

    def __init__(self, content: str):
        """Load the tokenizer.

        Raises:
            ValueError: it is random, its ids have gaps, it does not decode what it encodes, or it gives other tokens
                where a text is cut between words.
        """
        self._tokenizer = _load_tokenizer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings, ids = json.loads(self._tokenizer.to_str()), self._tokenizer.get_vocab()
        self.symbols = tuple(sorted(ids, key=ids.__getitem__))
        _require(sorted(ids.values()) == list(range(len(ids))), "its ids are not 0, 1, 2 and so on")
        _require(not settings["model"].get("dropout"), "it is random (dropout)")
        added = [token["content"] for token in settings["added_tokens"]]
        _require(not any(BORDER.search(text + "a") for text in added), "an added token has a space between words")
        self._word: list[int] = self._plain(_BEFORE).tolist()
        self.token_bytes = tuple(self._bytes_added(settings))
        unknown = settings["model"].get("unk_token")
        self.unk = settings["model"].get("unk_id") if unknown is None else ids.get(unknown)
        if {bytes([byte]) for byte in range(256)} <= set(self.token_bytes):
            self.unk = None  # no byte is unknown
        self._anchored: bool = False
        """Whether a part of a text is encoded after a word, because the tokenizer adds a space to what is first."""
        self._anchored = self._cuts_change_tokens()
        _require(
            not (self._anchored and self._cuts_change_tokens()), "a text that is cut between words gets other tokens"
        )
        theirs = self._tokenizer.decode(self.encode(_PROBE).tolist(), skip_special_tokens=False)
        ours = self._decode(_PROBE)
        _require(bool(ours) and ours.split() == theirs.split(), "its decoder does not write one token after another")

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Ids of `text`, which must have no lone surrogates."""
        if not self._anchored:
            return self._plain(text)
        return np.concatenate([np.empty(0, np.int32), *self._parts(_slices(text.encode()), inside=text[:1] == " ")])

    @property
    def lost(self) -> list[str]:
        """What a text loses. That a word is unknown says nothing about its capitals and accents."""
        tried = {name: text for name, text in _LOSSES.items() if " " in name or self.unk not in self.encode(text)}
        return [name for name, text in tried.items() if self._decode(text) != text]

    def _plain(self, text: str) -> Int32[np.ndarray, " T"]:
        return np.concatenate([np.empty(0, np.int32), *_encoded(self._tokenizer, _slices(text.encode()))])

    def _parts(self, parts: Iterator[str], *, inside: bool) -> Iterator[Int32[np.ndarray, " _"]]:
        """The ids of parts of a text; `inside`: the first one is not the beginning."""
        for part in parts:
            if inside:
                [ids] = _encoded(self._tokenizer, iter([_BEFORE + part]))
                inside = ids[: len(self._word)].tolist() == self._word  # or the word has merged with what follows
            yield ids[len(self._word) :] if inside else self._plain(part)
            inside = True

    def _cuts_change_tokens(self) -> bool:
        [whole] = _encoded(self._tokenizer, iter([_PROBE]))
        parts = BORDER.split(_PROBE)
        found = self._parts(iter(parts), inside=False) if self._anchored else _encoded(self._tokenizer, iter(parts))
        return not np.array_equal(np.concatenate(list(found)), whole)

    def _decode(self, text: str) -> str:
        """`text` as the tokenizer writes it."""
        return b"".join(self.token_bytes[i] for i in self.encode(text)).decode("utf-8", "replace").strip(" ")

    def _bytes_added(self, settings: dict[str, Any]) -> Iterator[bytes]:
        """The bytes of each token, by id."""
        added = {token["content"] for token in settings["added_tokens"]}
        decoder = json.dumps(settings["decoder"])
        if '"ByteLevel"' in decoder:
            for symbol in self.symbols:
                known = bytes(map(CHARACTERS.__getitem__, symbol)) if CHARACTERS.keys() >= set(symbol) else b""
                yield symbol.encode() if symbol in added else known
            return
        before = self._tokenizer.decode(self._word, skip_special_tokens=False)
        pairs = [[*self._word, i] for i in range(len(self.symbols))]
        texts = self._tokenizer.decode_batch(pairs, skip_special_tokens=False)
        for symbol, text in zip(self.symbols, texts, strict=True):
            byte = _BYTE.fullmatch(symbol) if '"ByteFallback"' in decoder else None
            yield bytes.fromhex(byte[1]) if byte else text.removeprefix(before).encode()


def train_bpe(texts: Iterable[str], size: int, whole: Sequence[str] = ()) -> str:
    """Train a tokenizer of at most `size` tokens on `texts`, and return its JSON. Tokens are 256 bytes, then pairs.

    Each text in `whole` is one token, which never becomes part of a pair. A newline is always a separate token. The
    same texts give the same JSON.
    """
    with _library_errors():
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        lines, pairs = pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, pairs])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet, special = pre_tokenizers.ByteLevel.alphabet(), list(whole)
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        )
        tokenizer.train_from_iterator(_for_pairs(texts), trainer)
        return tokenizer.to_str()


def renumber(content: str, order: Sequence[int]) -> str:
    """The same tokenizer, in which the token with id `order[i]` gets id i."""
    tokenizer = _load_tokenizer(content)
    settings, ids = json.loads(tokenizer.to_str()), tokenizer.get_vocab()
    assert sorted(order) == sorted(ids.values()), "order must name every id once"
    new_ids = {old: new for new, old in enumerate(order)}
    # List added tokens among the others too; otherwise the library would number them last.
    symbols = sorted(ids, key=lambda symbol: new_ids[ids[symbol]])
    settings["model"]["vocab"] = {symbol: i for i, symbol in enumerate(symbols)}
    for token in settings["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    settings["added_tokens"].sort(key=lambda token: token["id"])
    return json.dumps(settings)


def cuts(text: bytes | bytearray) -> Iterator[int]:
    """Where a text, which may continue, is cut: at the last border of each 16 KB, or without one at the next character
    after them."""
    start = 0
    while (end := next_character(text, start + _SLICE)) < len(text):
        border = _LAST_BORDER.match(text, start, start + _SLICE + 2)
        start = border.end() if border else end
        yield start


def next_character(text: bytes | bytearray, position: int) -> int:
    """Where the first character begins, at or after `position`; the end of the text if there is none."""
    while position < len(text) and text[position] & 0xC0 == 0x80:
        position += 1
    return min(position, len(text))


def _slices(text: bytes) -> Iterator[str]:
    """The parts of a text between its `cuts`."""
    return (text[start:end].decode() for start, end in pairwise([0, *cuts(text), len(text)]))


def _encoded(tokenizer: Tokenizer, parts: Iterator[str]) -> Iterator[Int32[np.ndarray, " _"]]:
    """The ids of each part of a text."""
    while batch := list(islice(parts, _BATCH)):
        with _library_errors():
            encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        yield from (np.array(encoding.ids, np.int32) for encoding in encodings)


def _for_pairs(texts: Iterable[str]) -> Iterator[str]:
    """The slices in which pairs are counted. One without a border is cut into short parts, because counting takes time
    quadratic in a word; of the parts with long words, at most `_PARTS` are counted, at equal distances in the text."""
    kept: list[str] = []
    seen, stride = 0, 1
    for piece in (piece for text in texts for piece in _slices(text.encode())):
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


def _load_tokenizer(content: str) -> Tokenizer:
    with _library_errors():
        from tokenizers import Tokenizer

        json.loads(content, parse_int=_checked_number)
        return Tokenizer.from_str(content)


@contextmanager
def _library_errors() -> Iterator[None]:
    """Turn an error of the library, which may be missing, into a sentence."""
    try:
        yield
    except ImportError as error:
        raise Mistake(
            "Subwords must have the tokenizers library, which is not installed. "
            "Run `pip install tokenizers`, or choose another unit."
        ) from error
    except BaseException as error:  # the library raises no narrower class, and its panics are not Exceptions
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        reason = shortened(str(error)).rstrip(".")
        raise Mistake(f"The tokenizer must be a tokenizer.json of the tokenizers library: {reason}.") from error


def _checked_number(number: str) -> int:
    if len(number) > 8 or int(number) > _LARGEST_ID:
        raise Mistake(f"it has the number {number[:20]}, and ids are at most {_LARGEST_ID:,}")
    return int(number)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Mistake(f"The tokenizer must decode what it encodes, but {otherwise}. Name another one, or train one.")
