"""Lossless compression: the probabilities of a model, coded by a range coder (Martin 1979, Pasco 1976).

A text is cut into blocks, and a block into as many rows as the predictor has. At each step the predictor gives the
probabilities of the next byte of every row, the coder codes these bytes, and the predictor reads them. The decoder
repeats the same computation, so it knows the same probabilities. Both read one byte of each row at a time, because a
call over many positions rounds differently.

constriction's range coder rounds probabilities to 24 bits and gives each byte at least 2^-24 (Bamler 2022,
arXiv 2201.01741).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer, UInt8
from torch import Tensor

from ..config.settings import Lengths
from ..data.vocab import Vocab
from ..mistake import Mistake
from ..model.memory import Memory
from ..model.ngram_index import NgramIndex
from ..model.step import VectorStep
from ..runtime.device import autocast
from ..runtime.terminal import report_progress

CPU = torch.device("cpu")
TESTED = 40
"""Steps of the self-test: more than a segment of a model that learns."""


@runtime_checkable
class Predictor(Protocol):
    """Predicts the next byte of each row."""

    rows: int

    def probs(self) -> Float[np.ndarray, "B 256"]:
        """The probabilities of the next byte of each row. They need not sum to exactly one."""
        ...

    def read(self, symbols: UInt8[np.ndarray, " B"], live: Bool[np.ndarray, " B"]) -> None:
        """Go on after these bytes. A row that is not `live` has ended, and its byte means nothing."""
        ...


class Code(NamedTuple):
    """A coded block."""

    raw: bool
    """Whether `content` is the text itself, because its code is not shorter."""
    content: bytes


class BlockCoder:
    """Codes blocks one after another. The predictor goes on from block to block."""

    def __init__(self, predictor: Predictor):
        self.predictor: Predictor = predictor
        self.queue: Any = library().stream.queue
        self.family: Any = library().stream.model.Categorical(perfect=False)

    def encode(self, text: bytes, what: str = "coding") -> Code:
        """Code a block. `what` names it in reports of progress."""
        encoder, known = self.queue.RangeEncoder(), _cut(text, self.predictor.rows)

        def code(step: int, live: Bool[np.ndarray, " B"], probs: Float[np.ndarray, "B 256"]) -> None:
            encoder.encode(known[live, step].astype(np.int32), self.family, probs[live])

        self._run(known, len(text), code, what)
        content = encoder.get_compressed().astype("<u4").tobytes()
        return Code(True, text) if len(content) >= len(text) else Code(False, content)

    def decode(self, block: Code, length: int, what: str = "decoding") -> bytes:
        """The text of a block, of `length` bytes; other bytes if the probabilities differ from the encoder's."""
        if block.raw:
            self._run(_cut(block.content, self.predictor.rows), length, lambda *_: None, what)
            return block.content
        text = _cut(bytes(length), self.predictor.rows)
        decoder = self.queue.RangeDecoder(np.frombuffer(block.content, "<u4").astype(np.uint32))

        def code(step: int, live: Bool[np.ndarray, " B"], probs: Float[np.ndarray, "B 256"]) -> None:
            text[live, step] = decoder.decode(self.family, probs[live])

        self._run(text, length, code, what)
        return text.tobytes()[:length]

    def _run(self, text: UInt8[np.ndarray, "B T"], length: int, code: Callable[..., None], what: str) -> None:
        """Go through a block. `code` sees each step's probabilities before the predictor sees its bytes."""
        rows, steps = text.shape
        first = np.arange(rows) * steps
        for step in report_progress(range(steps), what):
            live, probs = first + step < length, self.predictor.probs()
            if not np.isfinite(probs).all():
                raise FloatingPointError("The model's probabilities are not numbers (nan), so they can code nothing.")
            code(step, live, probs)
            self.predictor.read(text[:, step], live)


def _cut(text: bytes, rows: int) -> UInt8[np.ndarray, "B T"]:
    """The rows of a block, each a run of its bytes. Zeros fill the last rows."""
    steps = -(-len(text) // rows)
    return np.frombuffer(text.ljust(rows * steps, b"\0"), np.uint8).reshape(rows, steps).copy()


class Reader:
    """Reads one more token of each row: the same numbers as `Step`, with matches that cost the same in any window."""

    def __init__(self, model: Any, past: Memory, lengths: Lengths, index: NgramIndex | None):
        self.model: Any = model
        self.index: NgramIndex | None = index
        self.step: VectorStep = VectorStep(model.backbone, past, lengths, head=model.softmax)

    @torch.no_grad()
    def __call__(self, ids: Integer[np.ndarray, " B"]) -> tuple[Float[Tensor, "B V"], Any]:
        """Log-probabilities of the next token, and the rows of n-grams that were read."""
        x, rows = self.model.embedding(torch.from_numpy(ids[:, None])), None
        if self.index is not None:
            rows = torch.from_numpy(self.index.add(ids))[:, None]
            x = x + self.model.ngrams.vectors(rows)
        return self.step(x), rows


class TrainedPredictor:
    """A trained model of bytes. Bytes that its vocabulary lacks have the share of the probability that they had so far.

    After such a byte the model reads a space, or its most frequent byte if it has no space.
    """

    def __init__(self, model: Any, vocab: Vocab, lengths: Lengths, rows: int, precision: str):
        self.rows: int = rows
        self.precision: str = precision
        self.known: Integer[np.ndarray, " N"] = np.array(vocab.symbols, np.int64)
        self.unknown: Integer[np.ndarray, " U"] = np.setdiff1d(np.arange(256), self.known)
        space = int(np.argmax(self.known == ord(" ")))
        self.ids: Integer[np.ndarray, " 256"] = np.full(256, space, np.int64)
        self.ids[self.known] = np.arange(len(self.known))
        self.counts: Float[np.ndarray, " U"] = np.full(len(self.unknown), 1 / 64 / max(len(self.unknown), 1))
        """How often each unknown byte occurred, plus a start that lets the first one occur."""
        self.total: float = 1.0
        with autocast(precision, CPU):
            model = model.for_inference(precision)
            index = None if model.ngrams is None else NgramIndex(model.ngrams, rows)
            self.reader: Reader = Reader(model, model.backbone.empty_memory(rows, lengths), lengths, index)
        first = self.ids[ord("\n")] if ord("\n") in self.known else space
        self._read(np.full(rows, first))

    def probs(self) -> Float[np.ndarray, "B 256"]:
        share = self.counts.sum() / (self.total + self.counts.sum())
        probs = np.zeros((self.rows, 256))
        probs[:, self.known] = self.next * (1 - share)
        probs[:, self.unknown] = self.counts / (self.total + self.counts.sum())
        return probs

    def read(self, symbols: UInt8[np.ndarray, " B"], live: Bool[np.ndarray, " B"]) -> None:
        new = np.bincount(symbols[live], minlength=256)
        self.counts += new[self.unknown]
        self.total += float(new[self.known].sum())
        self._read(self.ids[symbols])

    def _read(self, ids: Integer[np.ndarray, " B"]) -> None:
        with autocast(self.precision, CPU):
            log_probs, _ = self.reader(ids)
        self.next: Float[np.ndarray, "B N"] = log_probs.double().exp().numpy()


def self_test(predictor: Predictor) -> str:
    """The SHA-256 of what a new predictor computes for a fixed text: equal ones compute the same bits."""
    digest = hashlib.sha256()
    text = (np.arange(TESTED)[:, None] * 7 + np.arange(predictor.rows) * 13) % 11 + ord("a")
    for symbols in text.astype(np.uint8):
        digest.update(predictor.probs().tobytes())
        predictor.read(symbols, np.ones(predictor.rows, bool))
    digest.update(predictor.probs().tobytes())
    return digest.hexdigest()


def library() -> Any:
    """constriction, which has the range coder."""
    try:
        import constriction
    except ImportError as error:
        raise Mistake("Compression needs the package constriction. Install it: pip install constriction.") from error
    return constriction
