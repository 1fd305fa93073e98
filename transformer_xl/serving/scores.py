"""Pieces of a choice, whose log-probabilities are JSON from the start: a quarter of the memory of Python's lists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..data.vocab import Vocab
from ..evaluation.generate import TokenText
from .jobs import Top

LEAST = -9999.0
"""JSON has no infinity."""
FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""OpenAI's lists of a text's tokens."""


@dataclass
class Delta:
    """A piece of a choice: text, and the log-probabilities of some tokens."""

    text: str = ""
    scores: dict[str, bytearray] = field(default_factory=dict)
    """OpenAI's lists as JSON without brackets, a quarter as large as Python's."""
    finish_reason: str | None = None

    def add(self, other: Delta) -> None:
        self.text += other.text
        self.finish_reason = other.finish_reason
        for name, values in other.scores.items():
            mine = self.scores.setdefault(name, bytearray())
            mine += b"," * bool(mine) + values

    def logprobs(self, count: int | None) -> bytes:
        """OpenAI's `logprobs` as JSON."""
        if count is None:
            return b"null"
        lists = {name: b"[%b]" % self.scores.get(name, b"") for name in FIELDS}
        return to_json({}, **lists if count else {**lists, "top_logprobs": b"null"})


class TokenScores:
    """Names the tokens of a text and gives their log-probabilities, piece by piece."""

    def __init__(self, vocab: Vocab, ids: list[int], offset: int = 0, starts: Iterable[int] = ()) -> None:
        """Begin after `ids`, whose text has `offset` characters; `starts` are the offsets of the first tokens."""
        self.offset: int = offset
        self.count: int = 0
        """The number of tokens before the next piece."""
        self._starts: Iterator[int] = iter(starts)
        self._vocab: Vocab = vocab
        self._writer = TokenText(vocab, ids)

    def add(self, tokens: list[int], log_probs: list[float], tops: list[Top]) -> dict[str, bytearray]:
        """The fields of `Delta.scores` for the next tokens."""
        names, offsets, likely = [token_name(self._vocab, token) for token in tokens], [], []
        for token, name, log_prob, top in zip(tokens, names, log_probs, tops, strict=True):
            written = self._writer.write(token)
            # A space before a word, and what a byte before has left that is no character, are written with it.
            own = len(name) if written.endswith(name) else len(written)
            offsets.append(next(self._starts, self.offset + len(written) - own))
            self.offset += len(written)
            best = {token_name(self._vocab, other): max(value, LEAST) for other, value in top}
            # Also of a token that is not among the likeliest.
            likely.append(best | {name: max(log_prob, LEAST)} if top else None)
        return as_json(names, [max(each, LEAST) for each in log_probs], likely, offsets)


def token_starts(vocab: Vocab, prompt: str | list[int], ids: list[int]) -> list[int]:
    """Where each token begins in a text, if the vocabulary does not keep its spaces or line ends. Otherwise, and for a
    prompt of ids, empty."""
    if not isinstance(prompt, str) or not ids or (vocab.unit != "word" and vocab.newlines != "drop"):
        return []
    if vocab.unit == "word":
        return [word.start() for word in re.finditer(r"\S+" if vocab.line_end is None else r"\n|\S+", prompt)]
    kept = [i for i, character in enumerate(prompt) if character != "\n"]
    if vocab.unit == "char":
        return kept
    of_bytes = [i for i in kept for _ in prompt[i].encode("utf-8", "surrogatepass")]
    sizes = [len(vocab.token_bytes[token]) for token in ids]
    return [of_bytes[start] for start in np.cumsum([0, *sizes[:-1]])]


def as_json(*lists: list[Any]) -> dict[str, bytearray]:
    return {name: bytearray(json.dumps(values)[1:-1].encode()) for name, values in zip(FIELDS, lists, strict=True)}


def to_json(content: dict[str, Any], **more: bytes) -> bytes:
    """An object as JSON, with fields that are JSON already."""
    fields = {name: json.dumps(value, allow_nan=False).encode() for name, value in content.items()} | more
    return b"{" + b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields.items()) + b"}"


def token_name(vocab: Vocab, token: int) -> str:
    r"""A unique text for each token: its own, or `bytes:\xe2` if it is part of a character."""
    if vocab.is_text:
        return str(vocab.symbols[token])
    raw = vocab.token_bytes[token]
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
