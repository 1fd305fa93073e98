"""`Vocab`: which symbols a corpus is made of, and text to ids and back.

Symbols are bytes, characters or words, most frequent first, so that the bands of the adaptive softmax are frequency
bands. How line ends are treated belongs to the vocabulary too: a prompt is then prepared like the training text.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, Literal

import numpy as np
from jaxtyping import Int, Integer

Unit = Literal["byte", "char", "word"]
Newlines = Literal["drop", "keep"]

EOS = "<eos>"
UNK = "<unk>"
_CODE_POINTS = 0x110000


@dataclass(frozen=True, repr=False)
class Vocab:
    """An immutable list of symbols; equal when unit, symbols and treatment of line ends are.

    Words are what white space separates, and each line end is one `<eos>`. `<unk>`, where it is a symbol of a
    character or word vocabulary, stands for everything outside it.
    """

    unit: Unit
    symbols: tuple[int, ...] | tuple[str, ...]
    """By id; bytes are integers 0 to 255."""
    newlines: Newlines = "keep"
    """Whether `encode` keeps line ends or removes them."""

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
        """Count the symbols of `texts` and order them by frequency, ties by first occurrence.

        `closed` keeps exactly the symbols that occur, as a published protocol does. Otherwise any text can be
        encoded: all 256 bytes in their own order, or an `<unk>` that also takes symbols rarer than `min_count`
        (a word's place is by frequency, a character's is the end). `<eos>` is always id 0.
        """
        if unit == "byte" and not closed:
            return cls(unit, tuple(b for b in range(256) if newlines == "keep" or b != 0x0A), newlines)
        counts: Counter[Any] = Counter()
        for text in texts:
            parts = _split(text, unit, newlines)
            counts.update(_count_bytes(parts) if isinstance(parts, bytes) else parts)
        first = [EOS] if unit == "word" and newlines == "keep" else []
        for symbol in first:
            counts.pop(symbol, None)
        if closed:
            return cls(unit, (*first, *(symbol for symbol, _ in counts.most_common())), newlines)
        rare = [symbol for symbol, count in counts.items() if count < min_count and symbol != UNK]
        counts[UNK] += sum(counts.pop(symbol) for symbol in rare)
        if unit == "char":
            counts[UNK] = 0
        return cls(unit, (*first, *(symbol for symbol, _ in counts.most_common())), newlines)

    def __len__(self) -> int:
        return len(self.symbols)

    def __str__(self) -> str:
        return f"{len(self)} {self.unit}s, newlines {'kept' if self.newlines == 'keep' else 'dropped'}"

    def __repr__(self) -> str:
        return f"Vocab({self})"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest little-endian type that holds every id."""
        return np.dtype("u1" if len(self) <= 1 << 8 else "<u2" if len(self) <= 1 << 16 else "<i4")

    @cached_property
    def unk(self) -> int | None:
        """The id of `<unk>`, if there is one."""
        return self._ids.get(UNK)

    @cached_property
    def line_end(self) -> int | None:
        """The id that ends a line: `<eos>` among words, the newline among bytes and characters, if there is one."""
        return self._ids.get({"byte": 0x0A, "char": "\n", "word": EOS}[self.unit])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that makes this vocabulary what it is."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def encode(self, text: str | bytes, *, start: int = 0) -> Integer[np.ndarray, " T"]:
        """Ids of `text`, in the smallest type.

        A `ValueError` names a symbol that has no id and its place, counted from `start` where more text stands before.
        """
        parts = _split(text, self.unit, self.newlines)
        if isinstance(parts, bytes):
            if unknown := parts.translate(None, bytes(self._ids)):
                raise self._no_id(unknown[:1], start + parts.index(unknown[:1]))
            return np.frombuffer(parts.translate(self._byte_ids), np.uint8).copy()
        default = -1 if self.unk is None else self.unk
        if isinstance(parts, str):
            ids = self._char_ids[np.frombuffer(parts.encode("utf-32-le", "surrogatepass"), "<u4")]
        else:
            ids = np.fromiter(map(self._ids.get, parts, repeat(default)), np.int32, len(parts))
        if self.unk is None and ids.size and ids.min() < 0:
            position = int(ids.argmin())
            raise self._no_id(parts[position], start + position)
        return ids.astype(self.dtype, copy=False)

    def decode(self, ids: Any) -> str:
        """Text of `ids`. Bytes that are not UTF-8 and unknown characters show as U+FFFD.

        More ids only append to the text of characters and words; for bytes, feed `decode_bytes` to an incremental
        UTF-8 decoder to stream.
        """
        if self.unit == "byte":
            return self.decode_bytes(ids).decode("utf-8", errors="replace")
        symbols = [str(self.symbols[i]) for i in self._checked(ids).tolist()]
        if self.unit == "char":
            return "".join("\ufffd" if symbol == UNK else symbol for symbol in symbols)
        pieces = []
        for previous, symbol in zip([EOS, *symbols], symbols, strict=False):
            pieces.append("\n" if symbol == EOS else symbol if previous == EOS else " " + symbol)
        return "".join(pieces)

    def decode_bytes(self, ids: Any) -> bytes:
        """The very bytes of `ids`; UTF-8 where the symbols are characters or words."""
        if self.unit != "byte":
            return self.decode(ids).encode("utf-8", "surrogatepass")
        return np.array(self.symbols, np.uint8)[self._checked(ids)].tobytes()

    def symbol_bytes(self) -> Int[np.ndarray, " V"]:
        """How many bytes of UTF-8 text each symbol stands for, to turn nats into bits per byte.

        A word counts the space behind it, a line end is 1, and an unknown character is taken as 1.
        """
        if self.unit == "byte":
            return np.ones(len(self), np.int64)
        behind = int(self.unit == "word")
        sizes = [len(str(symbol).encode("utf-8", "surrogatepass")) + behind for symbol in self.symbols]
        for symbol in [EOS] if self.unit == "word" else [UNK]:
            if symbol in self._ids:
                sizes[self._ids[symbol]] = 1
        return np.array(sizes, np.int64)

    def to_json(self) -> dict[str, Any]:
        """What `vocab.json` holds."""
        return {"unit": self.unit, "newlines": self.newlines, "symbols": list(self.symbols)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Vocab:
        """The vocabulary that `to_json` wrote; `ValueError` where it is damaged."""
        try:
            unit, newlines, symbols = content["unit"], content["newlines"], tuple(content["symbols"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"vocab.json must hold unit, newlines and symbols; {error} is missing.") from error
        if unit not in ("byte", "char", "word") or newlines not in ("drop", "keep"):
            raise ValueError(f"vocab.json has unit {unit!r} and newlines {newlines!r}, which no vocabulary has.")
        if unit == "byte":
            sound = all(isinstance(symbol, int) and 0 <= symbol < 256 for symbol in symbols)
        else:
            sound = all(isinstance(s, str) and (unit == "word" or len(s) == 1 or s == UNK) for s in symbols)
        if not sound or not symbols or len(set(symbols)) != len(symbols):
            raise ValueError(f"vocab.json must list each {unit} of the vocabulary once; it is damaged.")
        return cls(unit, symbols, newlines)

    @cached_property
    def _ids(self) -> dict[Any, int]:
        return {symbol: i for i, symbol in enumerate(self.symbols)}

    @cached_property
    def _byte_ids(self) -> bytes:
        return bytes(self._ids.get(byte, 0) for byte in range(256))

    @cached_property
    def _char_ids(self) -> np.ndarray:
        table = np.full(_CODE_POINTS, -1 if self.unk is None else self.unk, np.int32)
        for symbol, i in self._ids.items():
            if symbol != UNK:
                table[ord(symbol)] = i
        return table

    def _checked(self, ids: Any) -> np.ndarray:
        array = np.asarray(ids, dtype=np.int64)
        assert array.size == 0 or 0 <= array.min() <= array.max() < len(self), "an id outside the vocabulary"
        return array

    def _no_id(self, symbol: object, position: int) -> ValueError:
        return ValueError(
            f"{symbol!r}, {self.unit} {position:,} of the text from 0, is not in the vocabulary ({self}), which has no "
            "<unk>. Remove it from the text, or use a model trained on text that has it."
        )


def _split(text: str | bytes, unit: Unit, newlines: Newlines) -> bytes | str | list[str]:
    """`text` as a sequence of symbols, in the order they stand."""
    if unit == "byte":
        # surrogateescape: a command line hands over bytes that are not UTF-8 this way.
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return raw.translate(None, b"\n") if newlines == "drop" else raw
    decoded = text if isinstance(text, str) else text.decode("utf-8")
    if unit == "char":
        return decoded.replace("\n", "") if newlines == "drop" else decoded
    return decoded.replace("\n", f" {EOS} " if newlines == "keep" else " ").split()


def _count_bytes(data: bytes) -> dict[int, int]:
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    seen = sorted(np.flatnonzero(counts).tolist(), key=lambda byte: data.index(byte))
    return {byte: int(counts[byte]) for byte in seen}
