"""The choices of a response, put together from the engine's events, whole or piece by piece."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..data.vocab import Vocab
from ..evaluation.generate import TokenText
from .texts import Ended, Scored, Top, Wrote

LEAST = -9999.0
"""JSON has no infinity."""


def token_name(vocab: Vocab, token: int) -> str:
    r"""A text for a token, a different one for each: its own text, or for a part of a character `bytes:\xe2`."""
    if vocab.is_text:
        return str(vocab.symbols[token])
    raw = vocab.token_bytes[token]
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass
class Delta:
    """A piece of a choice: text, and the log-probabilities of some tokens."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, other: Delta) -> None:
        self.text += other.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            getattr(self, name).extend(getattr(other, name))
        self.finish_reason = other.finish_reason

    def to_json(self, logprobs: int | None) -> dict[str, Any]:
        """The fields of OpenAI's choice, without its index."""
        found = None
        if logprobs is not None:
            found = {name: getattr(self, name) for name in ("tokens", "token_logprobs", "text_offset")}
            found["top_logprobs"] = self.top_logprobs if logprobs else None
        return {"text": self.text, "logprobs": found, "finish_reason": self.finish_reason}


class Choice:
    """One continuation of one prompt."""

    def __init__(self, vocab: Vocab, ids: Sequence[int], *, leads: bool, echo: str | None, scores: bool = True) -> None:
        """
        Args:
            ids: what the engine reads, at least one.
            leads: whether the first of them belongs to the prompt. It has no log-probability.
            echo: the text of the prompt, if it is wanted.
            scores: whether log-probabilities are wanted.
        """
        self.written: int = 0
        """Tokens written so far."""
        self._vocab, self._ids, self._echo, self._leads, self._scores = vocab, ids, echo, leads, scores
        read = ids[:1] if echo is not None else ids
        self._writer = TokenText(vocab, np.asarray(read, dtype=np.int64))
        self._read = self._offset = 0

    def begin(self) -> Delta:
        """The text of the prompt, and its first token."""
        if self._echo is None:
            return Delta()
        first = Delta(self._echo)
        if self._leads:
            name = token_name(self._vocab, int(self._ids[0]))
            first.tokens, first.token_logprobs = [name], [None]
            first.top_logprobs, first.text_offset = [None], [0]
            self._offset = len(self._vocab.decode(self._ids[:1]))
        return first

    def take(self, event: Scored | Wrote | Ended) -> Delta:
        """What an event adds."""
        delta = Delta()
        if isinstance(event, Scored):
            for log_prob, top in zip(event.log_probs.tolist(), event.tops, strict=True):
                self._read += 1
                self._add(delta, int(self._ids[self._read]), log_prob, top)
            return delta
        delta.text = event.text
        if isinstance(event, Wrote):
            self.written += 1
            self._add(delta, event.token, event.log_prob, event.top)
        else:
            delta.finish_reason = event.reason
        return delta

    def _add(self, delta: Delta, token: int, log_prob: float, top: Top) -> None:
        if not self._scores:
            return
        name = token_name(self._vocab, token)
        delta.tokens.append(name)
        delta.token_logprobs.append(json_number(log_prob))
        likely = {token_name(self._vocab, other): json_number(value) for other, value in top}
        if top:
            likely[name] = json_number(log_prob)  # also of a token that is not among the likeliest
        delta.top_logprobs.append(likely)
        delta.text_offset.append(self._offset)
        self._offset += len(self._writer.write(token))


def json_number(log_prob: float) -> float:
    if math.isnan(log_prob):
        raise FloatingPointError("The model's probabilities are not numbers (nan).")
    return max(log_prob, LEAST)
