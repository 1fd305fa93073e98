"""Weights that are rounded at once give the losses and gradients of autocast, which rounds each where it is used."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from transformer_xl.config.settings import Lengths, TransformerXLConfig
from transformer_xl.model.baselines import build_model
from transformer_xl.model.modules import RowLinear
from transformer_xl.train import replay
from transformer_xl.train.half import rounded_weights
from transformer_xl.train.objective import Counts, Objective

CPU = torch.device("cpu")
SHAPE = TransformerXLConfig(
    vocab_size=13, n_layer=4, d_model=16, n_head=2, d_head=8, d_inner=16, dropout=0.0, dropatt=0.0
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
    assert torch.equal(nll, expected) and nll.dtype == torch.float32
    for name, gradient in gradients.items():
        other = others[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            assert gradient.dtype == torch.float32
            off = (gradient.to_dense() - other.to_dense()).norm()
            # The parts of memory and segment in the gradient of keys and values are added in half precision.
            assert off <= 2**-7 * other.to_dense().norm() + 1e-7, name


def test_whoever_reads_a_weight_or_copies_the_model_meanwhile_finds_it_exact() -> None:
    model = build_model(SHAPE).requires_grad_()
    plain, hooked, frozen, parametrized = (model.backbone.layers[i].feed_forward for i in (0, 1, 2, 3))
    hooked.inner.register_forward_pre_hook(lambda linear, _: linear.weight.data.clamp_(-0.01, 0.01))
    frozen.inner.bias.requires_grad_(False)
    plain.inner.register_parameter("another", nn.Parameter(torch.zeros(3)))
    weight_norm(parametrized.inner)
    x = torch.randn(2, 16)
    with pytest.raises(KeyError), torch.autocast("cpu", torch.bfloat16), rounded_weights(Objective(model)):
        assert plain.inner.used(x)[0].dtype == torch.bfloat16 and plain.inner(x).dtype == torch.bfloat16
        assert torch.equal(plain.outer.used(x)[0], plain.outer.weight.bfloat16())
        for other in (hooked, frozen, parametrized):
            assert other.inner.rounded is None and other.outer.rounded is not None
        assert plain.inner.weight.dtype == model.embedding.tables[0].dtype == torch.float32
        with torch.no_grad():
            plain.outer.weight += 1
        assert plain.outer.used(x)[0] is plain.outer.weight, "it was written after it was rounded"
        weight = model.backbone.layers[1].attention.qkv.weight
        for create in (True, False):
            loss = model.backbone.layers[1].attention.qkv(x).square().sum()
            [gradient] = torch.autograd.grad(loss, weight, create_graph=create, retain_graph=True)
            assert gradient.dtype == torch.float32 and gradient.requires_grad == create
            loss = sum(each.sum() for each in model.backbone.layers[1].attention.keys_values(x[None]))
            [rows] = torch.autograd.grad(loss, weight, create_graph=create, retain_graph=True)
            assert rows[:16].count_nonzero() == 0 and rows[16:].all()
        with torch.autocast("cpu", enabled=False):
            assert deepcopy(plain).inner(x).dtype == plain.inner(x).dtype == torch.float32
        raise KeyError
    assert all(linear.rounded is None for linear in model.modules() if isinstance(linear, RowLinear))
