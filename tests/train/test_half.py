"""Weights that are rounded at once give the losses and gradients of autocast, which rounds each where it is used."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from transformer_xl.config.settings import Lengths, TransformerXLConfig
from transformer_xl.model.baselines import build_model
from transformer_xl.train import replay
from transformer_xl.train.half import rounded_weights
from transformer_xl.train.objective import Counts, Objective

CPU = torch.device("cpu")
SHAPE = TransformerXLConfig(
    vocab_size=13, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16, dropout=0.0, dropatt=0.0
)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "changes",
    [  # the first setting names the case
        {},
        {"pre_lnorm": True, "qk_norm": True, "untie_r": True},
        {"share_position_projection": True},
        {"gate": "gru"},
        {"ngrams": (2, 3), "ngram_rows": 50, "cutoffs": (5,), "div_val": 2},
        {"kind": "qrnn", "n_head": TransformerXLConfig.n_head, "d_head": TransformerXLConfig.d_head},
        {"kind": "al-rfou", "positions": 12},
    ],
    ids=lambda changes: next(iter(changes), "plain"),
)
def test_rounded_weights_are_those_of_autocast(
    changes: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = build_model(replace(SHAPE, **changes), recompute="pre_lnorm" in changes)
    objective, lengths = Objective(model, alpha=0.1), Lengths(tgt_len=6, mem_len=6)
    ids = torch.randint(13, (2, 7))
    memory = model(ids[:, :-1], ids[:, 1:], None, lengths)[1]
    found = []
    for rounding in (rounded_weights, lambda _: nullcontext()):
        monkeypatch.setattr(replay, "rounded_weights", rounding)
        model.zero_grad()
        call, counts = (ids[:, :-1], ids[:, 1:], memory, lengths), Counts.of(ids[:, 1:] >= 0)
        nll, _ = replay.forward_backward(objective, precision, torch.ones(()), call, counts, 0.0)
        found.append((nll, {name: weight.grad for name, weight in model.named_parameters()}))
    (nll, gradients), (expected, others) = found
    assert torch.equal(nll, expected)
    for name, gradient in gradients.items():
        other = others[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            assert gradient.dtype == torch.float32
            off = (gradient.to_dense() - other.to_dense()).norm()
            # The parts of memory and segment in the gradient of keys and values are added in half precision.
            assert off <= 2**-7 * other.to_dense().norm() + 1e-7, name


def test_a_model_has_its_weights_after_a_call_that_fails() -> None:
    model = build_model(SHAPE)
    before = dict(model.named_parameters())
    with pytest.raises(KeyError), torch.autocast("cpu", torch.bfloat16), rounded_weights(Objective(model)):
        assert model.backbone.layers[0].attention.qkv.weight.dtype == torch.bfloat16
        assert model.embedding.tables[0].dtype == torch.float32
        raise KeyError
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
