"""Adaptive layers equal one table and one distribution, and losses have the order of their targets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model, text
from torch import Tensor, nn

from transformer_xl.mistake import Mistake
from transformer_xl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax

D_MODEL = 7


@st.composite
def shapes(draw: st.DrawFn) -> dict:
    """Vocabulary, bands and widths that settings.py allows."""
    vocab_size = draw(st.integers(2, 19))
    cutoffs = tuple(sorted(draw(st.sets(st.integers(1, vocab_size - 1), max_size=3))))
    div_val = draw(st.integers(1, 3)) if cutoffs else 1
    widest = div_val ** len(cutoffs)
    d_embed = draw(st.sampled_from([D_MODEL, 5, 11])) if widest <= 5 else widest + draw(st.integers(0, 3))
    return {"vocab_size": vocab_size, "d_embed": d_embed, "cutoffs": cutoffs, "div_val": div_val}


SHAPES = {
    "plain": {"vocab_size": 17, "d_embed": D_MODEL, "cutoffs": (), "div_val": 1},
    "plain, projected": {"vocab_size": 17, "d_embed": 5, "cutoffs": (), "div_val": 1},
    "bands of one table": {"vocab_size": 17, "d_embed": D_MODEL, "cutoffs": (3, 5), "div_val": 1},
    "bands, projected": {"vocab_size": 17, "d_embed": 11, "cutoffs": (3, 5), "div_val": 1},
    "narrowing bands": {"vocab_size": 17, "d_embed": 13, "cutoffs": (3, 5, 12), "div_val": 2},
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.double()


def embedding(shape: dict, seed: int = 0, scale: float = 1.0) -> AdaptiveEmbedding:
    sizes = {name: value for name, value in shape.items() if name not in ("vocab_size", "d_embed")}
    module = filled(AdaptiveEmbedding(shape["vocab_size"], shape["d_embed"], D_MODEL, **sizes, scale=scale), seed)
    assert isinstance(module, AdaptiveEmbedding)
    return module


def softmax(shape: dict, seed: int = 0) -> AdaptiveSoftmax:
    sizes = {name: value for name, value in shape.items() if name not in ("vocab_size", "d_embed")}
    module = filled(AdaptiveSoftmax(shape["vocab_size"], shape["d_embed"], D_MODEL, **sizes), seed)
    assert isinstance(module, AdaptiveSoftmax)
    return module


def band_of(word: int, shape: dict) -> tuple[int, int]:
    """The band of a word and its row in the band."""
    band = sum(word >= cutoff for cutoff in shape["cutoffs"])
    return band, word - (0, *shape["cutoffs"])[band]


def vector_of(module, word: int, shape: dict, *, project: bool) -> Tensor:
    """A word's row in its table, projected to the model's width if there is a projection."""
    band, index = band_of(word, shape)
    row = module.tables[band][index] if shape["div_val"] > 1 else module.tables[0][word]
    assert row.shape == (shape["d_embed"] // shape["div_val"] ** (band if shape["div_val"] > 1 else 0),)
    projections = list(module.projections)
    if not project or not projections:
        return row
    return projections[band if len(projections) > 1 else 0] @ row


def distribution(module: AdaptiveSoftmax, h: Tensor, shape: dict) -> Tensor:
    """log p of every word by the formula, one word at a time: head in band 0, cluster column plus tail in others."""
    score = [
        vector_of(module, word, shape, project=True) @ h + module.bias[word] for word in range(shape["vocab_size"])
    ]
    members = [
        [w for w in range(shape["vocab_size"]) if band_of(w, shape)[0] == band]
        for band in range(1 + len(shape["cutoffs"]))
    ]
    clusters = []
    for i in range(len(shape["cutoffs"])):
        assert module.cluster_weight is not None and module.cluster_bias is not None
        projections = list(module.projections)
        column = projections[0] @ module.cluster_weight[i] if projections else module.cluster_weight[i]
        clusters.append(column @ h + module.cluster_bias[i])
    head = torch.stack([score[w] for w in members[0]] + clusters).log_softmax(0)
    out = list(head[: len(members[0])])
    for band in range(1, len(members)):
        tail = torch.stack([score[w] for w in members[band]]).log_softmax(0)
        out += list(head[len(members[0]) + band - 1] + tail)
    return torch.stack(out)


@settings(deadline=None)
@given(shape=shapes(), seed=st.integers(0, 99))
def test_an_embedding_is_one_table(shape: dict, seed: int) -> None:
    module = embedding(shape, seed, scale=3.0)
    ids = torch.randint(shape["vocab_size"], (3, 5), generator=torch.Generator().manual_seed(seed))
    expected = torch.stack([3.0 * vector_of(module, int(word), shape, project=True) for word in ids.flatten()])
    torch.testing.assert_close(module(ids), expected.view(3, 5, D_MODEL))


@settings(deadline=None)
@given(shape=shapes(), seed=st.integers(0, 99))
def test_a_softmax_is_one_distribution(shape: dict, seed: int) -> None:
    module = softmax(shape, seed)
    hidden = torch.randn(2, 3, D_MODEL, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = module.log_probs(hidden)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(2, 3, dtype=torch.float64))
    torch.testing.assert_close(found[1, 2], distribution(module, hidden[1, 2], shape))


@settings(deadline=None)
@given(shape=shapes(), seed=st.integers(0, 99), data=st.data())
def test_losses_have_the_order_of_the_targets(shape: dict, seed: int, data: st.DataObject) -> None:
    module = softmax(shape, seed)
    words = st.lists(st.integers(-1, shape["vocab_size"] - 1), min_size=15, max_size=15)
    targets = torch.tensor(data.draw(words)).view(3, 5)
    hidden = torch.randn(3, 5, D_MODEL, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = -module.log_probs(hidden).gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)
    torch.testing.assert_close(module.nll(hidden, targets), expected, check_dtype=False)


@each_shape
def test_a_loss_has_the_gradient_of_its_log_probability(shape: dict) -> None:
    module = softmax(shape)
    hidden = torch.randn(3, 5, D_MODEL, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[0, 16, -1, 3, 4], [13, 2, 5, -1, 11], [12, 1, -1, 16, 7]])
    weight = torch.rand(3, 5, dtype=torch.float64)
    leaves = [hidden, *module.parameters()]
    found = torch.autograd.grad((module.nll(hidden, targets) * weight).sum(), leaves)
    picked = module.log_probs(hidden).gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)
    torch.testing.assert_close(found, torch.autograd.grad(-(picked * weight).sum(), leaves))


@each_shape
def test_unscored_targets_have_no_loss_and_no_gradient(shape: dict) -> None:
    module = softmax(shape)
    hidden = torch.randn(3, 5, D_MODEL, dtype=torch.float64, requires_grad=True)
    nll = module.nll(hidden, torch.full((3, 5), -1))
    assert not nll.any()
    for gradient in torch.autograd.grad(nll.sum(), [hidden, *module.parameters()]):
        assert not gradient.any()


@pytest.mark.parametrize("words", [[0, 1], [3, 4], [13, 16], [-1, -1]], ids=["first", "middle", "last", "none"])
@each_shape
def test_bands_without_a_token_stay_in_the_graph(shape: dict, words: list[int]) -> None:
    # Under DistributedDataParallel a parameter that takes no part in one rank's graph stops all ranks.
    ids = torch.tensor([words])
    for module in (softmax(shape), embedding(shape)):
        x = torch.randn(1, 2, D_MODEL, dtype=torch.float64)
        out = module.nll(x, ids) if isinstance(module, AdaptiveSoftmax) else module(ids.clamp(min=0))
        out.sum().backward()
        assert [name for name, p in module.named_parameters() if p.grad is None] == []
        assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_without_cutoffs_it_is_a_linear_layer_and_a_softmax() -> None:
    module = softmax(SHAPES["plain"])
    hidden = torch.randn(2, 3, D_MODEL, dtype=torch.float64)
    expected = F.linear(hidden, module.tables[0], module.bias).log_softmax(-1)
    torch.testing.assert_close(module.log_probs(hidden), expected)


@each_shape
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("projections", [True, False])
def test_tied_tables_share_storage(shape: dict, weight: bool, projections: bool) -> None:
    ends = nn.ModuleDict({"embedding": embedding(shape, seed=1), "softmax": softmax(shape, seed=2)})
    first, last = ends["embedding"], ends["softmax"]
    assert isinstance(first, AdaptiveEmbedding) and isinstance(last, AdaptiveSoftmax)
    last.tie(first, weight=weight, projections=(projections,) * (1 + len(shape["cutoffs"])))
    for mine, theirs in zip(first.tables, last.tables, strict=True):
        assert (mine is theirs) == weight
    for band, theirs in enumerate(last.projections):
        mine = first.projections[band if len(first.projections) > 1 else 0]
        assert (mine is theirs) == projections
    hidden = torch.randn(2, 3, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(last.log_probs(hidden)[0, 1], distribution(last, hidden[0, 1], shape))


def test_each_projection_is_tied_separately() -> None:
    shape = SHAPES["narrowing bands"]
    first, last = embedding(shape, seed=1), softmax(shape, seed=2)
    last.tie(first, weight=True, projections=(False, True, False, True))
    shared = [mine is theirs for mine, theirs in zip(first.projections, last.projections, strict=True)]
    assert shared == [False, True, False, True]


def test_bands_get_narrower_only_with_div_val() -> None:
    for module in (embedding(SHAPES["narrowing bands"]), softmax(SHAPES["narrowing bands"])):
        assert [tuple(x.shape) for x in module.tables] == [(3, 13), (2, 6), (7, 3), (5, 1)]
        assert [tuple(x.shape) for x in module.projections] == [(7, 13), (7, 6), (7, 3), (7, 1)]
    assert [tuple(x.shape) for x in embedding(SHAPES["bands of one table"]).tables] == [(17, D_MODEL)]
    assert len(embedding(SHAPES["bands of one table"]).projections) == 0
    assert tuple(softmax(SHAPES["narrowing bands"]).cluster_weight.shape) == (3, 13)  # pyright: ignore


@pytest.mark.parametrize("shape", [{}, {"cutoffs": (5, 11), "div_val": 2}])
def test_second_derivatives_are_refused(shape: dict) -> None:
    """Gradients are added in place, so the derivatives of gradients would be wrong."""
    model = small_model(**shape)
    loss = model.embedding(text(1, 5)).square().sum()
    with pytest.raises(Mistake, match="create_graph must be False"):
        torch.autograd.grad(loss, model.embedding.tables[0], create_graph=True)
