"""The model against tests/oracle.py, which shares no code with it: values, memories and derivatives.

Dropout is not covered: both are compared in eval mode.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import oracle
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor

from transformer_xl.config.settings import Lengths, TransformerXLConfig
from transformer_xl.model.memory import Memory
from transformer_xl.model.transformer_xl import TransformerXL

BATCH = 2
TOLERANCE = 1e-10  # relative above 1, absolute below: over 2,000 cases values were within 4e-14, derivatives 4e-13


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    vocab_size = draw(st.integers(5, 30))
    cutoffs = tuple(sorted(draw(st.sets(st.integers(1, vocab_size - 1), max_size=3))))
    d_model, d_embed = draw(st.sampled_from([4, 6, 10])), draw(st.sampled_from([None, 3, 8, 17, 64]))
    bands = len(cutoffs) + 1
    div_vals = [div_val for div_val in (1, 2, 4) if div_val ** (bands - 1) <= (d_embed or d_model)]
    return {
        "vocab_size": vocab_size,
        "n_layer": draw(st.integers(1, 3)),
        "n_head": draw(st.integers(1, 3)),
        "d_head": draw(st.sampled_from([1, 3, 5])),
        "d_model": d_model,
        "d_inner": draw(st.sampled_from([1, 7])),
        "d_embed": d_embed,
        "cutoffs": cutoffs,
        "div_val": draw(st.sampled_from(div_vals)) if cutoffs else 1,
        "tie_weight": draw(st.booleans()),
        "tie_projs": draw(st.just(()) | st.tuples(*[st.booleans()] * bands)),
        "untie_r": draw(st.booleans()),
        "pre_lnorm": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "final_norm": draw(st.booleans()),
        "layer_norm_epsilon": draw(st.sampled_from([1e-5, 1e-12, 1e-3])),
        "embedding_scale": draw(st.sampled_from([None, 0.7])),
        "zero_memory": draw(st.sampled_from([False, False, True])),
        "gate": draw(st.sampled_from(["none", "none", "input", "output", "highway", "sigmoid-tanh", "gru"])),
        "relu_output": draw(st.booleans()),
    }


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the parts of a `Case`; its first memory may be empty, short, long, or different for each row."""
    config, mem_len, held = draw(configs()), draw(st.integers(0, 8)), draw(st.integers(0, 10))
    counts = st.integers(0 if config["zero_memory"] else -8, held)  # zeros are attended, so there is no padding
    valid = draw(st.none() | st.lists(counts, min_size=BATCH, max_size=BATCH))
    return {
        "config": config,
        "lengths": {
            "tgt_len": 1,
            "mem_len": mem_len,
            "clamp_len": draw(st.none() | st.integers(1, 9)),
            "attn_len": draw(st.none() | st.integers(1, mem_len + 1)),
        },
        "backend": draw(st.sampled_from(["strided", "reference"])),
        "sizes": draw(st.lists(st.integers(1, 6), min_size=2, max_size=4)),
        "held": held,
        "valid": valid,
        "seed": draw(st.integers(0, 2**32)),
    }


class Case:
    """A model with random weights, a memory, and the segments of a text with each row's padding on the left."""

    def __init__(self, plan: dict[str, Any]):
        self.generator = torch.Generator().manual_seed(plan["seed"])
        self.config, self.lengths = TransformerXLConfig(**plan["config"]), Lengths(**plan["lengths"])
        self.model = TransformerXL(self.config, backend=plan["backend"]).double().eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(0.5 * self.normal(*parameter.shape) + name.endswith("norm.weight"))
        layers = tuple(self.normal(BATCH, plan["held"], self.config.d_model) for _ in range(self.config.n_layer))
        self.memory = Memory(layers, None if plan["valid"] is None else torch.tensor(plan["valid"]))
        self.segments = []
        for end, size in zip(accumulate(plan["sizes"]), plan["sizes"], strict=True):
            ids, targets = (self.below(self.config.vocab_size, size) for _ in range(2))
            targets[self.below(5, size) == 0] = -1
            padding = [min(max(size - end - count, 0), size) for count in self.memory.counts.tolist()]
            for row, pad in enumerate(padding):
                targets[row, :pad] = -1
            self.segments.append((ids, targets, padding))
        self.scored = max(sum(int((targets >= 0).sum()) for _, targets, _ in self.segments), 1)

    def below(self, bound: int, size: int) -> Tensor:
        return torch.randint(bound, (BATCH, size), generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)


def rows_of(memory: Memory) -> list[list[np.ndarray]]:
    """The positions of a memory that count: for each row an array for each layer."""
    counts = memory.counts.clamp(min=0).tolist()
    return [[x[b, memory.length - count :].numpy() for x in memory.layers] for b, count in enumerate(counts)]


def arrays(model: TransformerXL) -> dict[str, np.ndarray]:
    return {name: x.numpy() for name, x in model.state_dict().items()}


@settings(max_examples=examples(80))
@given(plan=plans())
@torch.no_grad()
def test_values_and_memories(plan: dict[str, Any]) -> None:
    case = Case(plan)
    model, call, memory = case.model, case.lengths, case.memory
    weights, rows = arrays(model), rows_of(memory)
    for ids, targets, padding in case.segments:
        log_probs, _ = model.log_probs(ids, memory, call)
        nll, memory = model(ids, targets, memory, call)
        for row, pad in enumerate(padding):
            if pad < ids.shape[1]:
                expected, rows[row] = oracle.read(weights, case.config, call, ids[row, pad:].tolist(), rows[row])
                assert_allclose(log_probs[row, pad:], expected, rtol=TOLERANCE, atol=TOLERANCE)
                expected = oracle.nll(expected, targets[row, pad:].tolist())
                assert_allclose(nll[row, pad:], expected, rtol=TOLERANCE, atol=TOLERANCE)
            for found, wanted in zip(rows_of(memory)[row], rows[row], strict=True):
                assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def mean_nll(case: Case) -> Tensor:
    memory, nats = case.memory, torch.zeros((), dtype=torch.float64)
    for ids, targets, _ in case.segments:
        nll, memory = case.model(ids, targets, memory, case.lengths)
        nats = nats + nll.sum()
    return nats / case.scored


def oracle_mean_nll(case: Case, weights: dict[str, np.ndarray]) -> Any:
    rows, nats = rows_of(case.memory), 0.0
    for ids, targets, padding in case.segments:
        for row, pad in enumerate(padding):
            if pad < ids.shape[1]:
                own = ids[row, pad:].tolist()
                log_probs, rows[row] = oracle.read(weights, case.config, case.lengths, own, rows[row])
                nats = nats + oracle.nll(log_probs, targets[row, pad:].tolist()).sum()
    return nats / case.scored


@settings(max_examples=examples(60))
@given(plan=plans(), which=st.integers(0, 99))
def test_derivatives(plan: dict[str, Any], which: int) -> None:
    # By complex steps, because they take no difference, so nothing cancels. In all parameters at once, and in one.
    case, h = Case(plan), 1e-30
    parameters = list(case.model.parameters())
    gradients = torch.autograd.grad(mean_nll(case), parameters, allow_unused=True, materialize_grads=True)
    for moved in (parameters, [parameters[which % len(parameters)]]):
        directions = {id(p): case.normal(*p.shape) for p in moved}  # by identity: a tied weight has several names
        weights = {
            name: p.detach().numpy() + 1j * h * (directions[id(p)].numpy() if id(p) in directions else 0)
            for name, p in case.model.state_dict(keep_vars=True).items()
        }
        products = [directions[id(p)] * g for p, g in zip(parameters, gradients, strict=True) if id(p) in directions]
        found = sum(float(product.sum()) for product in products)
        assert_allclose(found, np.imag(oracle_mean_nll(case, weights)) / h, rtol=TOLERANCE, atol=TOLERANCE)
