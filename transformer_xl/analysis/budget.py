"""An estimate of the memory that training needs, before anything is allocated.

    weights        4 bytes each; the gradient and two moments are as large: 16 P
    rows           for each layer and each of the B T rows, in fp32: the inputs of both sublayers and their norms, 16 D;
                   in the precision of training, s bytes a number: the inputs of the products, s (2 D + 6 H K + 2 F);
                   the keys and values of memory and segment, twice, 4 s H K (M + T) / T;
                   in fp32, what each of two gates with m matrices keeps: 8 D (m + 1)
    scores         (4 + s) B H T (M + T) for each layer, only with a backend that keeps them (strided, reference)
    gradients      of the rows and scores of one layer at a time: as if there were one more layer

The letters are defined in docs/math.md; F is d_inner, and B counts the rows of one chunk. Muon keeps one moment, and
the work of a product comes on top, so the estimate is within a factor of 2 of the measured peak.
"""

from __future__ import annotations

from ..config.settings import RunConfig
from ..config.shape import RECURRENT

KEEP_SCORES = ("strided", "reference")
"""Backends whose backward pass reads the probabilities."""


def training_bytes(config: RunConfig, parameters: int, *, precision: str, backend: str) -> int | None:
    """The estimated peak of a training step; None for recurrent networks and with `train.recompute`."""
    model, train = config.model, config.train
    if model.base_kind in RECURRENT or train.recompute:
        return None
    size = 2 if precision == "bf16" else 4
    segment = train.tgt_len + train.context_len
    keys, rows = train.mem_len + segment, train.batch_size // train.batch_chunk * segment
    inside = model.n_head * model.d_head
    row = 16 * model.d_model + size * (2 * model.d_model + 6 * inside + 2 * model.d_inner)
    row += 4 * size * inside * keys // segment
    row += 8 * model.d_model * (model.gate_matrices + 1) if model.gate_matrices else 0
    scores = (4 + size) * model.n_head * keys if backend in KEEP_SCORES else 0
    table = sum(model.ngram_sizes) * model.ngram_width  # neither momentum nor a full gradient
    return 16 * parameters - 8 * table + (model.n_layer + 1) * rows * (row + scores)
