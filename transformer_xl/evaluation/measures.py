"""Converts nats to the figures that papers report."""

from __future__ import annotations

import math


def bits(nats: float) -> float:
    """Nats in bits; a loss per character gives bpc."""
    return nats / math.log(2)


def perplexity(nats: float) -> float:
    """e to the loss; inf if a float cannot hold it."""
    return math.inf if nats > 709 else math.exp(nats)


def figure(unit: str, loss: float) -> tuple[str, float]:
    """The name and value of a loss: ppl for words, byte pairs and ids, bpc for bytes and characters."""
    return ("ppl", perplexity(loss)) if unit in ("word", "bpe", "id") else ("bpc", bits(loss))


def tokens_per_second(tokens: int, seconds: float) -> float:
    """Throughput; 0 before any time has passed."""
    return tokens / seconds if seconds > 0 else 0.0
