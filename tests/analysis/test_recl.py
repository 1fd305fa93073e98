"""RECL: its definition by hand, groups with an answer in closed form, and losses given exactly their context."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from small_models import small_model, text
from torch import nn

from transformer_xl.analysis.recl import (
    effective_length,
    feeding_of,
    gains,
    mean_losses,
    measure,
    resample,
    sample_positions,
    true_losses,
)
from transformer_xl.config.settings import EvalConfig, Lengths, RunConfig, TrainConfig, TransformerXLConfig

CONTEXTS = np.arange(5, 56, 5)


def groups(models: int = 3, contexts: int = 4, positions: int = 13):
    shape = st.tuples(st.integers(1, models), st.integers(2, contexts), st.integers(1, positions))
    return shape.flatmap(lambda s: arrays.arrays(np.float64, s, elements=st.floats(0, 9, width=32)))


def by_definition(losses: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """f_i(c, c) and f_i(c, c'), position by position."""
    models, contexts, positions = losses.shape
    before, after = np.empty((models, contexts - 1)), np.empty((models, contexts - 1))
    for i, c in product(range(models), range(contexts - 1)):
        baseline = [min(losses[m, c, t] for m in range(models)) for t in range(positions)]
        hardest = sorted(range(positions), key=lambda t: -baseline[t])[: max(1, round(share * positions))]
        before[i, c] = sum(min(baseline[t], losses[i, c, t]) for t in hardest) / len(hardest)
        after[i, c] = sum(min(baseline[t], losses[i, c + 1, t]) for t in hardest) / len(hardest)
    return before, after


@given(losses=groups(), share=st.floats(0.01, 1))
def test_gains_follow_the_definition(losses, share):
    relative, perplexity = gains(losses, share)
    before, after = by_definition(losses, share)
    np.testing.assert_allclose(relative[0], (np.exp(before) - np.exp(after)) / np.exp(before), atol=1e-12)
    np.testing.assert_allclose(perplexity[0], np.exp(before) - np.exp(after), rtol=1e-9, atol=1e-9)
    assert (relative >= -1e-12).all() and (relative < 1).all()


@given(losses=groups(), share=st.floats(0.01, 1), data=st.data())
def test_a_weight_equals_that_many_copies_of_a_position(losses, share, data):
    counts = st.integers(0, 3)
    weights = data.draw(arrays.arrays(np.int64, losses.shape[2], elements=counts).filter(lambda w: w.sum() > 0))
    weighted = gains(losses, share, weights[None])
    repeated = gains(np.repeat(losses, weights, axis=2), share)
    for a, b in zip(weighted, repeated, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_a_gain_that_does_not_end_is_marked_as_not_reached():
    relative = np.array([[0.5, 0.02, 0.02], [0.5, 0.005, 0.5], [0.001, 0.5, 0.5]])
    tokens, reached, _ = effective_length(np.stack([relative, relative]), np.array([10, 20, 30, 40]))
    assert tokens.tolist() == [40, 20, 10] and reached.tolist() == [False, True, True]


def test_intervals_hold_the_truth_and_shrink_to_it_without_noise():
    """l_i(c, t) = 9 - log(min(c, cut_i)) / 2: model i learns from more text up to its cut."""
    random = np.random.default_rng(5)
    places = np.sort(random.choice(20_000, 600, replace=False))
    exact = (9 - np.log(np.minimum(CONTEXTS, [[20], [40]])) / 2)[..., None].repeat(600, 2)
    draws = resample(places, 55, seed=1, replicates=50)
    found = measure(exact, CONTEXTS, 0.5, draws)
    for tokens, reached, interval in (found.length, found.net):
        assert tokens.tolist() == [20, 40] and (interval == tokens).all() and reached.all()
    np.testing.assert_allclose(found.relative_interval, [found.relative, found.relative], atol=1e-12)
    noisy = exact + random.normal(0, 1, 600)
    mean, interval = mean_losses(noisy, draws)
    assert (interval[0] < mean).all() and (mean < interval[1]).all()
    width = (interval[1] - interval[0]).mean()  # of four standard errors of independent noise, from 50 draws
    assert 0.6 < width / (4 / math.sqrt(600)) < 1.4


def test_noise_alone_has_gains_but_no_net_gain():
    """Half of the targets are at 0.1 nats above the others, another half at each context: g = 1 - exp(-0.025)."""
    random = np.random.default_rng(2)
    losses = 4 + 0.1 * (random.random((1, len(CONTEXTS), 40_000)) < 0.5)
    draws = resample(np.arange(40_000), 55, seed=1, replicates=20)
    found = measure(losses, CONTEXTS, 1.0, draws)
    np.testing.assert_allclose([found.relative, found.back], 1 - math.exp(-0.025), rtol=0.05)
    assert not found.length.reached[0] and found.net.reached[0] and found.net.tokens[0] == CONTEXTS[0]


@given(losses=groups())
def test_gains_of_going_back_follow_the_definition(losses):
    found = measure(losses, CONTEXTS[: losses.shape[1]], 0.5, np.ones((1, losses.shape[2]), np.int64))
    before, after = by_definition(losses[:, ::-1], 0.5)
    np.testing.assert_allclose(found.back[:, ::-1], 1 - np.exp(after - before), atol=1e-12)


def test_draws_take_whole_stretches_of_text():
    places = np.array([3, 5, 12, 19, 40])
    draws = resample(places, 10, seed=1, replicates=200)
    assert draws.shape == (200, 5) and (draws[:, 0] == draws[:, 1]).all() and (draws[:, 2] == draws[:, 3]).all()
    assert (draws[:, [0, 2, 4]].sum(1) == 3).all() and (draws == resample(places, 10, seed=1, replicates=200)).all()


@given(
    tokens=st.integers(60, 400),
    step=st.integers(1, 7),
    steps=st.integers(2, 6),
    starts=st.sets(st.integers(1, 300), max_size=4),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_sampled_positions_are_distinct_and_have_their_context_in_their_document(
    tokens, step, steps, starts, seed, data
):
    documents, longest = [0, *sorted(start for start in starts if start < tokens)], step * steps
    options = {"step": step, "longest": longest, "seed": seed, "documents": documents}
    with pytest.raises(ValueError, match="positions must be at most"):
        sample_positions(tokens, tokens + 1, **options)
    room = sum(max(0, b - a - longest) // step * step for a, b in zip(documents, [*documents[1:], tokens], strict=True))
    if room == 0:
        return
    places = sample_positions(tokens, data.draw(st.integers(1, room)), **options)
    assert (np.diff(places) > 0).all() and places.max() < tokens
    assert (sample_positions(tokens, len(places), **options) == places).all()
    for place in places:
        begin = max(start for start in documents if start <= place)
        assert place - begin >= longest


def test_sampled_positions_are_spread_over_the_text_in_runs():
    places = sample_positions(100_000, 320, step=10, longest=100, seed=3)
    assert len(np.unique(places // 10_000)) >= 5
    assert np.mean(np.diff(places) == 10) > 0.9


class Listener(nn.Module):
    """Each target costs the number of tokens read before it, and a trifle that names them: the sum of their ids."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.read = 0

    def for_inference(self, precision="fp32"):
        return self

    def empty_cache(self, batch, lengths):
        return torch.zeros(batch, 2, dtype=torch.float64)

    def hidden(self, ids, memory, lengths):
        assert ids.shape[1] <= lengths.tgt_len
        self.read += ids.numel()
        heard = torch.stack([torch.ones_like(ids), ids], -1).double().cumsum(1) + memory[:, None]
        return heard, heard[:, -1] if lengths.mem_len else torch.zeros_like(memory)

    @property
    def softmax(self):
        return self

    def nll(self, heard, targets):
        return heard[..., 0] + heard[..., 1] / 1e6 + targets / 1e9


def heard(ids: np.ndarray, places: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    return np.array([[c + ids[t - c : t].sum() / 1e6 + ids[t] / 1e9 for t in places] for c in contexts])


@pytest.mark.unchecked
@given(
    step=st.integers(1, 7),
    steps=st.integers(2, 6),
    tgt_len=st.integers(1, 19),
    batch_size=st.integers(1, 9),
    most=st.integers(1, 50),
    recurrent=st.booleans(),
)
def test_every_scored_position_sees_exactly_its_context(step, steps, tgt_len, batch_size, most, recurrent):
    ids = text(1, 200, seed=step).numpy()[0].astype(np.uint8)
    longest = step * steps
    places = sample_positions(200, 60, step=step, longest=longest, seed=1)
    contexts = np.minimum(np.arange(step, longest + 1, step), most)
    lengths = Lengths(tgt_len=tgt_len, mem_len=longest if recurrent else 0)
    losses = true_losses(Listener(), ids, places, contexts, lengths, batch_size=batch_size)
    seen = contexts if recurrent else np.minimum(contexts, tgt_len)
    np.testing.assert_allclose(losses, heard(ids.astype(int), places, seen), rtol=1e-14)


@pytest.mark.unchecked
def test_a_window_serves_all_contexts_at_once():
    """Runs of 40 positions, 10 contexts of 10 tokens: 11 % more than a window of 100 for each position."""
    ids, listener = np.zeros(30_000, np.uint8), Listener()
    places = sample_positions(30_000, 320, step=10, longest=100, seed=0)
    true_losses(listener, ids, places, np.arange(10, 101, 10), Lengths(tgt_len=30, mem_len=100), batch_size=1)
    assert 1.0 <= listener.read / (320 * 100) < 1.25


@pytest.mark.parametrize("clamp_len", [None, 8])
def test_losses_of_a_model_equal_those_of_one_call_over_the_context(clamp_len):
    model = small_model(vocab_size=23)
    ids = text(1, 120).numpy()[0]
    places = sample_positions(120, 20, step=6, longest=24, seed=2)
    contexts = np.arange(6, 25, 6)
    lengths = Lengths(tgt_len=7, mem_len=24, clamp_len=clamp_len)
    found = true_losses(model, ids, places, contexts, lengths, batch_size=4)
    whole = Lengths(tgt_len=24, mem_len=0, clamp_len=clamp_len)
    for k, c in enumerate(contexts):
        for p, t in enumerate(places):
            piece = torch.from_numpy(ids[t - c : t + 1])[None]
            with torch.no_grad():
                nll, _ = model(piece[:, :-1], piece[:, 1:], None, whole)
            assert math.isclose(found[k, p], nll[0, -1].item(), rel_tol=1e-10)


def config(kind: str, *, mem_len: int, clamp_len: int | None = None, positions: int = 0) -> RunConfig:
    return RunConfig(
        model=TransformerXLConfig(vocab_size=23, kind=kind, positions=positions),  # type: ignore[arg-type]
        train=TrainConfig(tgt_len=32, mem_len=mem_len),
        eval=EvalConfig(clamp_len=clamp_len),
    )


def test_each_kind_of_model_reads_its_own_contexts():
    xl, _ = feeding_of(config("transformer-xl", mem_len=32, clamp_len=100), 400)
    assert xl == Lengths(tgt_len=32, mem_len=400, clamp_len=100)
    assert feeding_of(config("shaw", mem_len=0, positions=9), 400)[0].mem_len == 400
    for kind in ("vaswani", "al-rfou"):
        absolute = config(kind, mem_len=0, positions=32 if kind == "al-rfou" else 0)
        lengths, description = feeding_of(absolute, 400)
        assert (lengths.tgt_len, lengths.mem_len) == (32, 0) and "last 32" in description
        assert feeding_of(absolute, 20)[0].tgt_len == 20
    for kind in ("lstm", "qrnn"):
        lengths, description = feeding_of(config(kind, mem_len=0), 400)
        assert lengths.mem_len == 400 and "state" in description
