"""Prediction without a trained model: a small model that learns from each segment after the segment was coded.

Bellard 2019 (NNCP, https://bellard.org/nncp) compresses so: encoder and decoder start from the same random weights, and
take the same steps. Here the model has hashed n-grams and matches, which learn fast, and Adam has no momentum
(beta1 = 0), because a step must help the very next segment.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor, nn

from ..config.settings import Lengths, TrainConfig, TransformerXLConfig
from ..evaluation.coding import CPU, Reader
from ..model.memory import Memory
from ..model.ngram_index import NgramIndex
from ..model.ngrams import NgramEmbedding
from ..model.transformer_xl import TransformerXL
from ..runtime.device import autocast
from .optim import NGRAM_TABLE, build_optimizers, set_rates


class Learning(NamedTuple):
    """The settings of a model that learns while it codes."""

    name: str
    """In an archive. It changes with the settings, so a decoder refuses archives of others."""
    model: TransformerXLConfig
    train: TrainConfig
    shared: tuple[int, ...]
    """The matches that may be in any row (see `NgramIndex`)."""
    slot_bits: int


LEARNING = Learning(
    "1",
    TransformerXLConfig(
        vocab_size=256,
        n_layer=2,
        n_head=2,
        d_head=64,
        d_model=128,
        d_inner=512,
        ngrams=(1, 2, 3, 4, 5, 6, 8),
        matches=(3, 5, 8, 12, 20),
        match_window=1 << 24,
        ngram_rows=1 << 16,
        qk_norm=True,
        pre_lnorm=True,
        final_norm=True,
    ),
    TrainConfig(
        tgt_len=32,
        mem_len=64,
        optimizer="muon",
        momentum=0.9,
        lr=1e-2,
        betas=(0.0, 0.98),
        schedule="constant",
        warmup_steps=20,
        clip=1.0,
    ),
    shared=(12, 20),
    slot_bits=21,
)
"""Chosen on the first bytes of enwik8."""


class OnlinePredictor:
    """Predicts bytes with a model that starts from random weights.

    After each `tgt_len` bytes of every row it takes a training step on them. The step computes again what the coder
    computed, in one call, so both have the same past and matches.
    """

    def __init__(self, rows: int, precision: str, learning: Learning | None = None):
        learning = learning or LEARNING
        self.rows: int = rows
        self.precision: str = precision
        self.train: TrainConfig = learning.train
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.train.seed)
            self.model: TransformerXL = TransformerXL(learning.model).eval()
        assert self.model.ngrams is not None, "a model that learns fast has n-grams"
        self.embedding: NgramEmbedding = self.model.ngrams
        self.embedding.table.sparse = True
        self.index: NgramIndex = NgramIndex(self.embedding, rows, shared=learning.shared, slot_bits=learning.slot_bits)
        self.optimizers: list[torch.optim.Optimizer] = build_optimizers(self.model, self.train)
        self.clipped: list[nn.Parameter] = [p for name, p in self.model.named_parameters() if name != NGRAM_TABLE]
        self.memory: Memory = self.model.backbone.empty_memory(rows, self.train.lengths)
        self.steps: int = 0
        self._begin(np.zeros(rows, np.int64))

    def probs(self) -> Float[np.ndarray, "B 256"]:
        return self.next.exp().numpy()

    def read(self, symbols: UInt8[np.ndarray, " B"], live: Bool[np.ndarray, " B"]) -> None:
        ids = symbols.astype(np.int64)
        self.targets.append(np.where(live, ids, -1))
        if len(self.targets) == self.train.tgt_len:
            self._learn()
            self._begin(ids)
        else:
            self._read(ids)

    def _begin(self, ids: np.ndarray) -> None:
        """Begin a segment with the current weights; its first inputs are the last bytes before it."""
        self.ids: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self.ngrams: list[Tensor] = []
        lengths = Lengths(tgt_len=1, mem_len=self.train.mem_len + self.train.tgt_len - 1)
        self.reader: Reader = Reader(self.model, self.memory, lengths, self.index)
        self._read(ids)

    def _read(self, ids: np.ndarray) -> None:
        self.next: Tensor
        self.next, rows = self.reader(ids)
        self.ids.append(ids)
        self.ngrams.append(rows)

    def _learn(self) -> None:
        """Take a step on the segment that was coded."""
        model, (ids, targets) = self.model, (torch.from_numpy(np.stack(x, 1)) for x in (self.ids, self.targets))
        model.zero_grad()
        with autocast(self.precision, CPU):
            x = model.embedding(ids) + self.embedding.vectors(torch.cat(self.ngrams, 1))
            outputs, memory = model.backbone(x, self.memory, self.train.lengths)
            nll = model.softmax.nll(outputs[-1], targets)
        (nll.sum() / (targets >= 0).sum().clamp(min=1)).backward()
        nn.utils.clip_grad_norm_(self.clipped, self.train.clip)
        set_rates(self.optimizers, self.steps, self.train)
        for optimizer in self.optimizers:
            optimizer.step()
        torch.clear_autocast_cache()
        self.memory = memory._replace(layers=tuple(layer.float() for layer in memory.layers))
        self.steps += 1
