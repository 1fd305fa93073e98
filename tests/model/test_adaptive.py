"""Losses have the order of their targets, and tables one gradient; `test_oracle` compares the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from small_models import Made, small_model, text
from torch import Tensor, nn

from transformer_xl.config.settings import TransformerXLConfig
from transformer_xl.mistake import Mistake
from transformer_xl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from transformer_xl.ops import cross_entropy

D_MODEL = 6


SHAPES = {
    "plain": {"vocab_size": 17, "d_embed": D_MODEL, "cutoffs": (), "div_val": 1},
    "plain, projected": {"vocab_size": 17, "d_embed": 5, "cutoffs": (), "div_val": 1},
    "bands of one table": {"vocab_size": 17, "d_embed": D_MODEL, "cutoffs": (3, 5), "div_val": 1},
    "bands, projected": {"vocab_size": 17, "d_embed": 11, "cutoffs": (3, 5), "div_val": 1},
    "narrowing bands": {"vocab_size": 17, "d_embed": 13, "cutoffs": (3, 5, 12), "div_val": 2},
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def filled(module: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.double()


@pytest.mark.parametrize("shape", [{}, {"cutoffs": (5, 11), "div_val": 2}])
def test_second_derivatives_are_refused(shape: dict) -> None:
    """Gradients are added in place, so the derivatives of gradients would be wrong."""
    model = small_model(**shape)
    loss = model.embedding(text(1, 5)).square().sum()
    with pytest.raises(Mistake, match="create_graph must be False"):
        torch.autograd.grad(loss, model.embedding.tables[0], create_graph=True)


# Large vocabularies: scores in blocks and one gradient for each table give the same numbers


IDS = torch.tensor([[0, 16, 1, 3, 4], [13, 2, 5, 5, 11], [12, 1, 0, 16, 7]])
TARGETS = torch.tensor([[16, 1, -1, 4, 13], [2, 5, 3, -1, 11], [1, 0, 16, 7, 12]])
SHARES = torch.rand(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
"""What each loss counts."""


@contextmanager
def blocks_of(columns: int) -> Iterator[None]:
    """Take this many columns at a time, for any number of rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "_ON_CPU", 0)
        patch.setattr(cross_entropy, "_LEAST_COLUMNS", columns)
        yield


def tied(shape: dict, *, weight: bool = True) -> tuple[AdaptiveEmbedding, AdaptiveSoftmax]:
    config = TransformerXLConfig(**shape, d_model=D_MODEL, embedding_scale=1.0)
    first, last = filled(AdaptiveEmbedding(config), seed=1), filled(AdaptiveSoftmax(config), seed=2)
    last.tie(first, weight=weight, projections=(True,) * (1 + len(shape["cutoffs"])))
    return first, last


def gradients(first: AdaptiveEmbedding, last: AdaptiveSoftmax) -> dict[str, Tensor | None]:
    found = {name: p.grad for name, p in nn.ModuleList([first, last]).named_parameters(remove_duplicate=False)}
    for parameter in (*first.parameters(), *last.parameters()):
        parameter.grad = None
    return found


def chained(first: AdaptiveEmbedding, last: AdaptiveSoftmax, ids: Tensor, targets: Tensor) -> Tensor:
    """Losses in which the softmax uses the tables that the embedding returned."""
    x, tables = first.lookup(ids)
    return last.nll(x.tanh(), targets, tables if last.is_tied(first) else None)


def apart(first: AdaptiveEmbedding, last: AdaptiveSoftmax, ids: Tensor, targets: Tensor) -> Tensor:
    """The same losses from whole distributions; embedding and softmax use the tables separately."""
    logs = last.log_probs(first(ids).tanh()).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return -logs * (targets >= 0)


@pytest.mark.parametrize("columns", [1, 3, 1000])
@pytest.mark.parametrize("weight", [True, False], ids=["tied", "untied"])
@each_shape
def test_blocks_change_no_loss_and_a_table_gets_the_gradient_of_all_its_uses(shape, weight, columns) -> None:
    first, last = tied(shape, weight=weight)
    losses = apart(first, last, IDS, TARGETS)
    (losses * SHARES).sum().backward()
    expected = gradients(first, last)
    parts = slice(0, 1), slice(1, 3)
    with blocks_of(columns):
        found = chained(first, last, IDS, TARGETS)
        torch.testing.assert_close(found, losses)
        (found * SHARES).sum().backward()
        torch.testing.assert_close(gradients(first, last), expected)
        halves = [(chained(first, last, IDS[rows], TARGETS[rows]) * SHARES[rows]).sum() for rows in parts]
        (halves[0] + halves[1]).backward()  # two segments, one backward
        torch.testing.assert_close(gradients(first, last), expected)
        for rows in parts:  # chunks of one step
            (chained(first, last, IDS[rows], TARGETS[rows]) * SHARES[rows]).sum().backward()
        torch.testing.assert_close(gradients(first, last), expected)


@pytest.mark.parametrize("frozen", ["tables", "bias", "projections"])
@each_shape
def test_frozen_weights_get_no_gradient_and_others_do(shape: dict, frozen: str) -> None:
    first, last = tied(shape)
    for name, parameter in last.named_parameters():
        parameter.requires_grad_(name.partition(".")[0] != frozen)
    apart(first, last, IDS, TARGETS).sum().backward()
    expected = gradients(first, last)
    chained(first, last, IDS, TARGETS).sum().backward()
    found = gradients(first, last)
    torch.testing.assert_close(found, expected)
    assert all((gradient is None) == (name.split(".")[1] == frozen) for name, gradient in found.items())


@pytest.mark.parametrize("cutoffs", [(), (50, 110)], ids=["plain", "bands"])
def test_a_step_allocates_neither_all_scores_nor_two_tensors_as_large_as_the_table(cutoffs: tuple[int, ...]) -> None:
    shape = {"vocab_size": 997, "d_embed": D_MODEL, "cutoffs": cutoffs, "div_val": 1}
    first, last = tied(shape)
    ids = torch.randint(110, 997, (5, 11), generator=torch.Generator().manual_seed(0))
    scores = ids.numel() * (997 - max(cutoffs, default=0))
    with Made() as made:
        apart(first, last, ids, ids.flip(0)).sum().backward()
    assert made.of(scores), "it records allocations"
    with blocks_of(13), Made() as made:
        chained(first, last, ids, ids.flip(0)).sum().backward()
    assert made.of(997 * D_MODEL) == ["aten.empty_like.default"] and not made.of(scores)
    table = first.tables[0].requires_grad_(False)
    with blocks_of(13), Made() as made:  # a frozen table needs no gradient
        first.lookup(IDS)
        last.nll(torch.randn(3, 5, D_MODEL, dtype=torch.float64), TARGETS).sum().backward()
    assert made.of(table.numel()) == []
