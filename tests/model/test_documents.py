"""Boundaries inside a segment: documents in one stream are read as each of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from small_models import VOCAB, small_backbone, small_model, vectors
from torch import Tensor

from transformer_xl.config.settings import Lengths

END, LENGTH = 3, 40
STARTS = (0, 5, 6, 17, 33, LENGTH)
CUTS = {
    "segments of 7": range(0, LENGTH, 7),
    "one segment": [0],
    "at a boundary": [0, 6, 17, 20],
    "tokens": range(LENGTH),
}
OTHER_BACKENDS = "reference", "chunked", "sdpa"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n-grams and matches": {"ngrams": (2, 3, 5), "ngram_rows": 37, "ngram_width": 6, "matches": (1, 2)},
    "QK-norm": {"qk_norm": True, "untie_r": True, "pre_lnorm": True},
    "shaw": {"kind": "shaw", "positions": 9},
    "lstm": {"kind": "lstm"},
    "qrnn": {"kind": "qrnn"},
}


def stream() -> tuple[Tensor, Tensor]:
    """Ids with ends of documents at `STARTS`, and targets."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(END + 1, VOCAB, (1, LENGTH), generator=generator)
    ids[0, list(STARTS[1:-1])] = END
    return ids, torch.randint(VOCAB, (1, LENGTH), generator=generator)


def read(model: Any, ids: Tensor, targets: Tensor, cuts: Sequence[int], lengths: Lengths) -> Tensor:
    memory, nats = None, []
    for start, end in pairwise([*cuts, ids.shape[1]]):
        nll, memory = model(ids[:, start:end], targets[:, start:end], memory, lengths)
        nats.append(nll)
    return torch.cat(nats, 1)


@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, "strided") for kind in KINDS), *(("plain", each) for each in OTHER_BACKENDS)]
)
@pytest.mark.parametrize("cuts", CUTS)
def test_a_packed_row_is_its_documents_alone(cuts: str, kind: str, backend: str) -> None:
    """Losses and all gradients, in float64."""
    model, plain = small_model(document_end=END, **KINDS[kind]), small_model(**KINDS[kind])
    for each in (model, plain):
        for layer in each.backbone.layers if kind not in ("lstm", "qrnn") else ():
            layer.attention.backend = backend
    ids, targets = stream()
    lengths = Lengths(tgt_len=7, mem_len=50)
    packed = read(model, ids, targets, CUTS[cuts], lengths)
    parts = []
    for start, end in pairwise(STARTS):  # cut where the stream is, because no gradient passes a cut
        own = [0, *(cut - start for cut in CUTS[cuts] if start < cut < end)]
        parts.append(read(plain, ids[:, start:end], targets[:, start:end], own, lengths))
    alone = torch.cat(parts, 1)
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-12)
    ours, theirs = (
        torch.autograd.grad(nats.sum(), list(each.parameters())) for nats, each in ((packed, model), (alone, plain))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_backbone_begins_episodes_where_it_is_told() -> None:
    """The memory after it is that of a reset, and a row's padding stays hidden."""
    backbone, lengths = small_backbone(), Lengths(tgt_len=7, mem_len=11)
    x, begins = vectors(3, 9), torch.zeros(3, 9, dtype=torch.bool)
    begins[0, 4] = begins[1, 0] = begins[2, 1] = True
    before = backbone.empty_memory(3, lengths, valid=torch.tensor([0, 0, -3]))
    outputs, memory = backbone(x, before, lengths, begins)
    alone, after = backbone(x[:1, 4:], None, lengths)
    torch.testing.assert_close(outputs[-1][:1, 4:], alone[-1])
    assert memory.counts.tolist() == [5, 9, 6]
    later = vectors(3, 2, seed=5)
    found, _ = backbone(later, memory, lengths)
    expected, _ = backbone(later[:1], after, lengths)
    torch.testing.assert_close(found[-1][:1], expected[-1])
    padded, _ = backbone(x[2:, 3:], None, lengths)
    torch.testing.assert_close(outputs[-1][2:, 3:], padded[-1])
