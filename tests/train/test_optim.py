"""Schedules are functions of the step; every weight belongs to one optimizer."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from transformer_xl.config.settings import TrainConfig, TransformerXLConfig
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.train import optim
from transformer_xl.train.optim import Muon, build_optimizers, learning_rate, set_rates

CONFIG = TrainConfig(lr=0.5, warmup_steps=10, max_steps=110)


def rates(**changes: object) -> list[float]:
    config = replace(CONFIG, **changes)
    return [learning_rate(step, config) for step in range(config.max_steps + 1)]


HALF_WAY = 0.5 * (0.1 + 0.9 * 0.5)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"schedule": "cosine", "min_lr_ratio": 0.1}, {10: 0.5, 60: HALF_WAY, 110: 0.05}),
        ({"schedule": "inv_sqrt"}, {10: 0.5 * math.sqrt(10 / 11), 19: 0.5 * math.sqrt(0.5), 79: 0.25 * math.sqrt(0.5)}),
        ({"schedule": "linear"}, {11: 0.5 * 0.9, 55: 0.25, 99: 0.05, 110: 0.0}),
        ({"schedule": "linear", "min_lr_ratio": 0.1}, {55: HALF_WAY, 110: 0.05}),
        ({"schedule": "constant"}, {10: 0.5, 60: 0.5, 110: 0.5}),
        (
            {"schedule": "cosine", "min_lr_ratio": 0.1, "average_from": 60, "average_lr_ratio": 0.5},
            {10: 0.5, 35: HALF_WAY, 60: 0.5 * 0.05, 110: 0.5 * 0.05},
        ),
    ],
)
def test_a_schedule_warms_up_and_has_the_rates_of_its_formula(changes, wanted):
    curve = rates(**changes)
    assert curve[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert {step: curve[step] for step in wanted} == pytest.approx(wanted)


def test_muon_takes_the_layers_matrices():
    model = TransformerXL(TransformerXLConfig(vocab_size=11, n_layer=1, n_head=2, d_head=4, d_model=8, d_inner=16))
    muon, adam = build_optimizers(model, replace(CONFIG, optimizer="muon"))
    assert [p.shape for p in muon.param_groups[0]["params"]] == [(24, 8), (8, 8), (8, 8), (16, 8), (8, 16)]
    assert any(p is model.embedding.tables[0] for p in adam.param_groups[0]["params"])


@pytest.mark.parametrize("name", ["adam", "sgd", "muon"])
def test_the_embedding_has_its_rate_until_the_cosine_ends(name):
    config = replace(CONFIG, optimizer=name, embedding_lr_ratio=2.0, min_lr_ratio=0.1)
    model = TransformerXL(TransformerXLConfig(vocab_size=11, n_layer=2, n_head=2, d_head=3, d_model=6, d_inner=7))
    optimizers = build_optimizers(model, config)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(map(id, model.parameters()))
    for step, twice in ((3, 2.0), (10, 2.0), (110, 1.0)):
        set_rates(optimizers, step, config, share=0.5)
        for group in groups:
            own = [p for p in group["params"] if p is model.embedding.tables[0]]
            assert group["lr"] == pytest.approx(0.5 * learning_rate(step, config) * (twice if own else 1.0))
            assert len(own) in (0, len(group["params"]))


def test_muon_steps_where_pytorch_has_no_onednn(monkeypatch):
    """As on Apple's processors, where nothing is registered below `torch.ops.mkldnn`."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    weight = torch.nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.ones(3, 2)
    Muon([weight], lr=0.1, adjust_lr_fn="match_rms_adamw").step()
    assert not torch.equal(weight, torch.ones(3, 2))


def test_muon_in_batches_is_muon_one_by_one(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x)  # both products in float64: rounding would hide a fault
    monkeypatch.setattr(optim, "_cpu_has_bf16_products", lambda: False)
    shapes = [(6, 4), (4, 6), (5, 5), (6, 4), (5, 5), (3, 9), (9, 3)]
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    torch.manual_seed(0)
    weights = [[torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]]
    weights.append([torch.nn.Parameter(weight.detach().clone()) for weight in weights[0]])
    theirs, ours = torch.optim.Muon(weights[0], **options), Muon(weights[1], **options)
    for step in range(6):
        for one, other in zip(*weights, strict=True):
            one.grad = other.grad = None if step == 2 and one.shape == (5, 5) else torch.randn_like(one)
        theirs.step()
        ours.step()
        for one, other in zip(*weights, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
            assert torch.equal(theirs.state[one]["momentum_buffer"], ours.state[other]["momentum_buffer"])
        ours.load_state_dict(deepcopy(theirs.state_dict()))
        with torch.no_grad():
            torch._foreach_copy_(weights[1], weights[0])
