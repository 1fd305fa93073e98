"""`Vocab`: the tokens of a corpus, and conversion of text to ids and back.

Tokens are bytes, characters, words or byte pairs, most frequent first, so the bands of the adaptive softmax are
frequency bands. The vocabulary includes the treatment of line ends, so a prompt is treated like the training text.

Ids that another program made have no text. Here they read as decimal numbers between spaces.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any, get_args

import numpy as np
from jaxtyping import Int, Integer

from ..config.settings import Newlines, Unit
from ..mistake import Mistake
from ..runtime.files import digest_of_json
from .subwords import Subwords

EOS = "<eos>"
UNK = "<unk>"
UNKNOWN = (UNK, "<UNK>")
"""Spellings of the token for words outside the vocabulary."""
LINE_ENDS: dict[Newlines, str] = {"keep": EOS, "sentence": "<S>"}
"""The token that ends a line of words."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_subwords = lru_cache(maxsize=2)(Subwords)  # to load a tokenizer of 50,000 tokens takes 0.4 s


@dataclass(frozen=True, repr=False)
class Vocab:
    """An immutable list of tokens. Two are equal if they have the same unit, tokens and treatment of line ends.

    White space separates words. Each line end is one `<eos>`. If `newlines` is "sentence", it is one `<S>`, which also
    begins a text. `<unk>` replaces characters or words outside the vocabulary.
    """

    unit: Unit
    symbols: tuple[int, ...] | tuple[str, ...]
    """The tokens by id; bytes are integers 0 to 255."""
    newlines: Newlines = "keep"
    """Whether `encode` keeps line ends or removes them."""
    tokenizer: str = ""
    """For byte pairs: the JSON of their tokenizer."""

    @classmethod
    def build(
        cls,
        unit: Unit,
        texts: Iterable[str | bytes],
        *,
        newlines: Newlines = "keep",
        min_count: int = 1,
        closed: bool = False,
    ) -> Vocab:
        """Make a vocabulary of the bytes, characters or words of `texts`, the most frequent first, equally frequent
        ones in order of occurrence.

        `closed` keeps exactly these tokens, as in a published protocol. Otherwise any text can be encoded: the tokens
        are all 256 bytes in numerical order, or there is an `<unk>` that also replaces tokens rarer than `min_count`.
        Among words, `<unk>` is sorted by frequency; among characters, it is last. The line end of words is always id 0.
        """
        if unit == "byte" and not closed:
            return cls(unit, tuple(b for b in range(256) if newlines == "keep" or b != 0x0A), newlines)
        counts = _counts(texts, unit, newlines)
        first = [LINE_ENDS[newlines]] if unit == "word" and newlines in LINE_ENDS else []
        for symbol in first:
            del counts[symbol]
        if not closed:
            rare = [symbol for symbol, count in counts.items() if count < min_count and symbol != UNK]
            counts[UNK] += sum(counts.pop(symbol) for symbol in rare)
            if unit == "char":
                counts[UNK] = 0
        return cls(unit, (*first, *(symbol for symbol, _ in counts.most_common())), newlines)

    def extended(self, texts: Iterable[str | bytes], min_count: int) -> Vocab:
        """The vocabulary with the other tokens of `texts` after its own, the most frequent first."""
        counts = _counts(texts, self.unit, self.newlines)
        known = {*self._ids, *UNKNOWN}
        new = (symbol for symbol, count in counts.most_common() if symbol not in known and count >= min_count)
        return replace(self, symbols=(*self.symbols, *new))

    @classmethod
    def of_ids(cls, size: int) -> Vocab:
        """The ids from 0 to `size` - 1 of another program's tokens."""
        return cls("id", tuple(map(str, range(size))))

    @classmethod
    def of_tokenizer(cls, content: str, newlines: Newlines = "keep") -> Vocab:
        """The tokens of a `tokenizer.json`, with its ids. `Subwords` refuses some tokenizers."""
        return cls("bpe", _subwords(content).symbols, newlines, json.dumps(json.loads(content)))

    @classmethod
    def read(cls, content: bytes, file: str, *, unit: Unit = "word", newlines: Newlines = "keep") -> Vocab:
        """The vocabulary in a file: one word per line, with or without a count after it, in the order of the file.

        If the file lacks a line end or an `<unk>`, it is added at the start. For `unit` "bpe", the file is a
        `tokenizer.json`.

        Raises:
            ValueError: `content`, read from `file`, is neither.
        """
        if unit == "bpe":
            try:
                return cls.of_tokenizer(text_of(content.removeprefix(BOM_UTF8), file), newlines)
            except ValueError as error:
                raise Mistake(f"{file}: {error}") from error
        if unit != "word":
            raise Mistake(f'A vocabulary file is for unit = "word" or "bpe", got "{unit}". Leave {file} out.')
        words = listed_words(content, file)
        needed = [LINE_ENDS[newlines]] if newlines in LINE_ENDS else []
        needed += [] if any(unk in words for unk in UNKNOWN) else [UNK]
        return cls(unit, (*(symbol for symbol in needed if symbol not in words), *words), newlines)

    def __len__(self) -> int:
        return len(self.symbols)

    def __str__(self) -> str:
        if self.unit == "id":
            return f"{len(self):,} ids"
        ends = {"keep": "newlines kept", "drop": "newlines dropped", "sentence": "sentences between <S>"}
        return f"{len(self):,} {units_of(self.unit)}, {ends[self.newlines]}"

    def __repr__(self) -> str:
        return f"Vocab({self})"

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The smallest little-endian integer type for the ids."""
        return np.dtype("u1" if len(self) <= 1 << 8 else "<u2" if len(self) <= 1 << 16 else "<i4")

    @cached_property
    def unk(self) -> int | None:
        """The id of `<unk>`; None if there is none."""
        if self.unit == "bpe" and self._pairs.unk is not None:
            return self._pairs.unk
        return next((self._ids[symbol] for symbol in UNKNOWN if symbol in self._ids), None)

    def id_of(self, token: str) -> int | None:
        """The id of a token, given as text or, for ids, as a number; None if it is not one token."""
        if self.unit == "byte":
            raw = token.encode("utf-8", "surrogateescape")
            return self._ids.get(raw[0]) if len(raw) == 1 else None
        found = self._ids.get(token)
        if self.unit == "bpe" and (found is None or self.token_bytes[found].strip(b" ") != token.encode()):
            return self.line_end if token == "\n" else None  # symbols may stand for other bytes
        return found

    def end_of_documents(self, token: str) -> int | None:
        """The id of `corpus.document_end`; None if it is empty. Raises a `Mistake` if it is not one token."""
        if token and self.id_of(token) is None:
            raise Mistake(
                f"corpus.document_end must be one token of the vocabulary ({self}), got {token!r}. Name one that ends "
                "the documents of the text."
            )
        return self.id_of(token) if token else None

    @cached_property
    def line_end(self) -> int | None:
        """The id that ends a line: `<eos>` or `<S>` among words, otherwise the newline; None if there is none."""
        if self.unit == "bpe":
            return self.token_bytes.index(b"\n") if b"\n" in self.token_bytes else None
        newlines = {"byte": 0x0A, "char": "\n", "word": LINE_ENDS.get(self.newlines), "id": None}
        return self._ids.get(newlines[self.unit])

    @property
    def lost(self) -> str:
        """A sentence about what a text loses in these tokens; "" if nothing."""
        names = ", ".join(self._pairs.lost) if self.unit == "bpe" else ""
        return names and f"The tokenizer loses {names}: texts are read and written without."

    @property
    def opening_ids(self) -> Integer[np.ndarray, " O"]:
        """The ids before a text: `<S>` before a first sentence, otherwise none."""
        return np.array([self.line_end] if self.newlines == "sentence" else [], self.dtype)

    @property
    def is_text(self) -> bool:
        """Whether each token consists of whole characters. Bytes and byte pairs may be fragments of one."""
        return self.unit in ("char", "word", "id")

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything in this vocabulary."""
        return digest_of_json(self.to_json())

    def encode(self, text: str | bytes, *, start: int = 0) -> Integer[np.ndarray, " T"]:
        """Ids of `text`, in the smallest type.

        Raises:
            ValueError: a token has no id. The error has its position; `start` is the position of the first token.
        """
        if not isinstance(text, str | bytes):
            raise Mistake(f"A text must be a str or bytes, got {type(text).__name__}. Give one text at a time.")
        if self.unit == "bpe":
            raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
            text = raw.decode("utf-8", "replace")
            return self._pairs.encode(text.replace("\n", "") if self.newlines == "drop" else text).astype(self.dtype)
        parts = _split(text, self.unit, self.newlines)
        if isinstance(parts, bytes):
            ids = self._table[np.frombuffer(parts, np.uint8)]
        elif isinstance(parts, str):
            ids = self._table[np.frombuffer(parts.encode("utf-32-le", "surrogatepass"), "<u4")]
        else:
            default = -1 if self.unk is None else self.unk
            ids = np.fromiter(map(self._ids.get, parts, repeat(default)), np.int32, len(parts))
        if self.unk is None and ids.size and ids.min() < 0:
            position = int(ids.argmin())
            symbol = parts[position : position + 1] if isinstance(parts, bytes) else parts[position]
            raise Mistake(
                f"{symbol!r}, {self.unit} {start + position:,} of the text from 0, is not in the vocabulary ({self}), "
                "which has no <unk>. Remove it from the text, or use a model trained on text that has it."
            )
        return ids.astype(self.dtype, copy=False)

    def unknown_in(self, texts: Iterable[str | bytes | np.ndarray], name: str) -> str:
        """How many tokens of the texts, or of ids, are unknown to the model, as a clause; "" if none. `name` names the
        texts."""
        ids = [text if isinstance(text, np.ndarray) else self.encode(text) for text in texts]
        unknown = 0 if self.unk is None else sum(int((each == self.unk).sum()) for each in ids)
        counts = f"{unknown:,} of {sum(map(len, ids)):,} {units_of(self.unit)}"
        return f"{counts} of {name} are unknown to the model" if unknown else ""

    def decode(self, ids: Any) -> str:
        """Text of `ids`. U+FFFD replaces bytes that are not UTF-8 and unknown characters.

        For characters and words, more ids only append text. To stream bytes and byte pairs, pass `decode_bytes` to an
        incremental UTF-8 decoder.
        """
        if not self.is_text:
            return self.decode_bytes(ids).decode("utf-8", errors="replace")
        symbols = [str(self.symbols[i]) for i in self._check_ids(ids).tolist()]
        if self.unit == "char":
            return "".join("\ufffd" if symbol == UNK else symbol for symbol in symbols)
        end = LINE_ENDS.get(self.newlines)
        pieces = []
        for previous, symbol in zip([end, *symbols], symbols, strict=False):
            pieces.append("\n" if symbol == end else symbol if previous == end else " " + symbol)
        return "".join(pieces)

    def decode_bytes(self, ids: Any) -> bytes:
        """The exact bytes of `ids`; UTF-8 if the tokens are characters or words."""
        if self.is_text:
            return self.decode(ids).encode("utf-8", "surrogatepass")
        return b"".join(map(self.token_bytes.__getitem__, self._check_ids(ids).tolist()))

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes of each token, if tokens are bytes or byte pairs."""
        return self._pairs.token_bytes if self.unit == "bpe" else tuple(bytes([int(each)]) for each in self.symbols)

    def token_sizes(self, document_end: int | None = None) -> Int[np.ndarray, " V"] | None:
        """Number of UTF-8 bytes of each token, to convert nats to bits per byte; None for ids, which have no text.

        A word includes the space after it. A line end of words and an unknown character count as 1, the id
        `document_end` as 0 unless it is the line end, because it is no text.
        """
        if self.unit == "id":
            return None
        sizes = self._sizes.copy()
        if document_end not in (None, self.line_end):
            sizes[document_end] = 0
        return sizes

    @cached_property
    def _sizes(self) -> Int[np.ndarray, " V"]:
        space, one = (1, self.line_end) if self.unit == "word" else (0, self.unk if self.unit == "char" else None)
        texts = (str(s).encode("utf-8", "surrogatepass") for s in self.symbols) if self.is_text else self.token_bytes
        return np.array([1 if i == one else len(text) + space for i, text in enumerate(texts)], np.int64)

    def to_json(self) -> dict[str, Any]:
        """The content of `vocab.json`."""
        content = {"unit": self.unit, "newlines": self.newlines, "symbols": list(self.symbols)}
        return content | ({"tokenizer": json.loads(self.tokenizer)} if self.tokenizer else {})

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Vocab:
        """Read the vocabulary that `to_json` wrote; raise `ValueError` if it is damaged."""
        try:
            unit, newlines, symbols = content["unit"], content["newlines"], tuple(content["symbols"])
            tokenizer = json.dumps(content["tokenizer"]) if unit == "bpe" else ""
        except (KeyError, TypeError) as error:
            must = "vocab.json must hold unit, newlines and symbols, and for byte pairs the tokenizer"
            raise Mistake(f"{must}; it is damaged.") from error
        if unit == "byte":
            sound = all(type(symbol) is int and 0 <= symbol < 256 for symbol in symbols)
        else:
            sound = all(is_text(s) and (unit != "char" or len(s) == 1 or s == UNK) for s in symbols)
        if unit == "id":
            sound = symbols == tuple(map(str, range(len(symbols))))
        if newlines == "sentence":
            sound = sound and unit == "word" and LINE_ENDS[newlines] in symbols
        known = unit in get_args(Unit) and newlines in get_args(Newlines)
        if not known or not sound or not symbols or len(set(symbols)) != len(symbols):
            raise Mistake(
                f"vocab.json must list each token once, got unit {unit!r}, newlines {newlines!r} and {len(symbols)} "
                "symbols; it is damaged."
            )
        return cls(unit, symbols, newlines, tokenizer)

    @cached_property
    def _ids(self) -> dict[Any, int]:
        return {symbol: i for i, symbol in enumerate(self.symbols)}

    @cached_property
    def _pairs(self) -> Subwords:
        pairs = _subwords(self.tokenizer)
        if pairs.symbols != self.symbols:
            raise Mistake("vocab.json must list the byte pairs of its tokenizer, and lists others; it is damaged.")
        return pairs

    @cached_property
    def _table(self) -> np.ndarray:
        """The id of each byte or code point; of one outside the vocabulary `unk`, or -1."""
        table = np.full(1 << 8 if self.unit == "byte" else 0x110000, -1 if self.unk is None else self.unk, np.int32)
        for symbol, i in self._ids.items():
            if symbol != UNK:
                table[symbol if self.unit == "byte" else ord(symbol)] = i
        return table

    def _check_ids(self, ids: Any) -> np.ndarray:
        array = np.asarray(ids, dtype=np.int64)
        wrong = array[(array < 0) | (array >= len(self))]
        if wrong.size:
            raise Mistake(f"An id must be from 0 to {len(self) - 1:,}, the vocabulary's, got {wrong.flat[0]}.")
        return array


def units_of(unit: str) -> str:
    """What a sentence calls the tokens."""
    return "subwords" if unit == "bpe" else f"{unit}s"


def is_text(symbol: object) -> bool:
    """Whether this is a non-empty string that UTF-8 can encode."""
    return isinstance(symbol, str) and symbol != "" and (symbol.isascii() or not _SURROGATE.search(symbol))


def _split(text: str | bytes, unit: Unit, newlines: Newlines) -> bytes | str | list[str]:
    """`text` as a sequence of bytes, characters or words."""
    if unit == "byte":
        raw = utf8(text) if isinstance(text, str) else text
        return raw.translate(None, b"\n") if newlines == "drop" else raw
    decoded = text if isinstance(text, str) else text.decode("utf-8")
    if unit == "char":
        return decoded.replace("\n", "") if newlines == "drop" else decoded
    end = f" {LINE_ENDS[newlines]} " if newlines in LINE_ENDS else " "
    return decoded.split() if unit == "id" else decoded.replace("\n", end).split()


def _counts(texts: Iterable[str | bytes], unit: Unit, newlines: Newlines) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for text in texts:
        counts.update(_split(text, unit, newlines))
    return counts


def utf8(text: str) -> bytes:
    """The bytes of a text, also of one with lone surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape")  # the command line passes bytes that are not UTF-8 as surrogates
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def text_of(content: bytes, file: str) -> str:
    """Decode UTF-8; a `Mistake` for other bytes names the file."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise Mistake(f"{file} must be UTF-8 text unless the tokens are bytes, and is not: {error}.") from error


def listed_words(content: bytes, file: str) -> list[str]:
    """The words of a vocabulary file, in order; raise `ValueError` if it is not a list of different words."""
    text = text_of(content.removeprefix(BOM_UTF8), file)
    numbered = enumerate(text.replace("\r", "").replace("\t", " ").split("\n"), start=1)  # words may hold other spaces
    lines = [(number, words) for number, line in numbered if (words := [word for word in line.split(" ") if word])]
    counted = bool(lines) and len(lines[0][1]) == 2
    seen: set[str] = set()
    for number, line in lines:
        if len(line) != 1 + counted or (counted and not line[1].isdecimal()) or line[0] in seen:
            raise Mistake(
                f"{file} must list each word once, one per line, with a count after all words or none; line {number} "
                f"is {' '.join(line)[:60]!r}."
            )
        seen.add(line[0])
    if not lines:
        raise Mistake(f"{file} must list words, one per line, and is empty.")
    return [line[0] for _, line in lines]
