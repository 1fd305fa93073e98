"""Any tokenizer of the `tokenizers` library: byte-level pairs, pieces of words as of T5, Llama and BERT, whole words.

One that is not byte-level may change a text before it cuts it into tokens: normalise characters, drop line ends or
capitals, or have one token for all that it does not know. What it loses is found by trying, and said. A token stands
for the bytes that it adds after a word, so the joined bytes of a text's ids are the text as the tokenizer writes it,
perhaps after a space. A text without borders is cut every 16 KB, and there may get a space too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int32

from ..mistake import Mistake
from .bpe import BORDER, bytes_of, encoded, load_tokenizer, slices

_WORD = "a"
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
        self._tokenizer = load_tokenizer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings, ids = json.loads(self._tokenizer.to_str()), self._tokenizer.get_vocab()
        self.symbols = tuple(sorted(ids, key=ids.__getitem__))
        _require(sorted(ids.values()) == list(range(len(ids))), "its ids are not 0, 1, 2 and so on")
        _require(not settings["model"].get("dropout"), "it is random (dropout)")
        added = [token["content"] for token in settings["added_tokens"]]
        _require(not any(BORDER.search(text + "a") for text in added), "an added token has a space between words")
        self._word: list[int] = self._plain(_WORD).tolist()
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
        return np.concatenate([np.empty(0, np.int32), *self._parts(slices(text.encode()), inside=text[:1] == " ")])

    @property
    def lost(self) -> list[str]:
        """What a text loses. That a word is unknown says nothing about its capitals and accents."""
        tried = {name: text for name, text in _LOSSES.items() if " " in name or self.unk not in self.encode(text)}
        return [name for name, text in tried.items() if self._decode(text) != text]

    def _plain(self, text: str) -> Int32[np.ndarray, " T"]:
        return np.concatenate([np.empty(0, np.int32), *encoded(self._tokenizer, slices(text.encode()))])

    def _parts(self, parts: Iterator[str], *, inside: bool) -> Iterator[Int32[np.ndarray, " _"]]:
        """The ids of parts of a text; `inside`: the first one is not the beginning."""
        for part in parts:
            if inside:
                [ids] = encoded(self._tokenizer, iter([_WORD + part]))
                inside = ids[: len(self._word)].tolist() == self._word  # or the word has merged with what follows
            yield ids[len(self._word) :] if inside else self._plain(part)
            inside = True

    def _cuts_change_tokens(self) -> bool:
        [whole] = encoded(self._tokenizer, iter([_PROBE]))
        parts = BORDER.split(_PROBE)
        found = self._parts(iter(parts), inside=False) if self._anchored else encoded(self._tokenizer, iter(parts))
        return not np.array_equal(np.concatenate(list(found)), whole)

    def _decode(self, text: str) -> str:
        """`text` as the tokenizer writes it."""
        return b"".join(self.token_bytes[i] for i in self.encode(text)).decode("utf-8", "replace").strip(" ")

    def _bytes_added(self, settings: dict[str, Any]) -> Iterator[bytes]:
        """The bytes of each token, by id."""
        added = {token["content"] for token in settings["added_tokens"]}
        decoder = json.dumps(settings["decoder"])
        if '"ByteLevel"' in decoder:
            yield from (symbol.encode() if symbol in added else bytes_of(symbol) or b"" for symbol in self.symbols)
            return
        before = self._tokenizer.decode(self._word, skip_special_tokens=False)
        pairs = [[*self._word, i] for i in range(len(self.symbols))]
        texts = self._tokenizer.decode_batch(pairs, skip_special_tokens=False)
        for symbol, text in zip(self.symbols, texts, strict=True):
            byte = _BYTE.fullmatch(symbol) if '"ByteFallback"' in decoder else None
            yield bytes.fromhex(byte[1]) if byte else text.removeprefix(before).encode()


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Mistake(f"The tokenizer must decode what it encodes, but {otherwise}. Name another one, or train one.")
