"""The settings of the Penn Treebank recipe: locked masks, word dropout, positions projected like tokens, activation
regularisation, averaged weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from amount import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_models import lengths, read, small_model, text

from transformer_xl.config.settings import TrainConfig
from transformer_xl.data.loader import Segment
from transformer_xl.ops.dropout import Dropout, dropout, dropout_relu, word_dropout
from transformer_xl.runtime.ranks import Ranks
from transformer_xl.train.objective import Objective
from transformer_xl.train.step import train_step, trained_targets

ALL = {
    "dropout": 0.2,
    "dropatt": 0.1,
    "dropout_words": 0.2,
    "dropout_input": 0.5,
    "dropout_output": 0.4,
    "locked_dropout": True,
    "share_position_projection": True,
}


@given(p=st.sampled_from([0.25, 0.5, 0.75]), seed=st.integers(0, 99))
def test_a_locked_mask_is_the_same_at_all_positions(p, seed):
    torch.manual_seed(seed)
    out = Dropout(p, locked=True)(torch.ones(3, 5, 7, 400))
    assert torch.equal(out, out[:, :, :1].expand_as(out))
    assert out.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
    assert out[:, :, 0].eq(0).double().mean().item() == pytest.approx(p, abs=0.035)  # 6,000 draws: five deviations
    assert not torch.equal(out[0], out[1])
    assert torch.equal(Dropout(0.0, locked=True)(out), out)
    assert torch.equal(Dropout(p, locked=True).eval()(out), out)
    forward = small_model(train=True, locked_dropout=True, dropout=p).backbone.layers[0].feed_forward
    same = forward(torch.randn(2, 1, 14, dtype=torch.float64).expand(2, 5, 14))
    torch.testing.assert_close(same, same[:, :1].expand_as(same))


@pytest.mark.parametrize("p", [0.15, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_with_a_relu_has_the_gradient_of_what_it_computes(dtype, p):
    x, d_out = torch.randn(40, 300, dtype=dtype, requires_grad=True), torch.randn(40, 300, dtype=dtype)
    d_out[0] = torch.inf
    found = []
    for form in (lambda: dropout_relu(x, p), lambda: dropout(x, p).relu()):
        torch.manual_seed(0)
        out = form()
        again = torch.autograd.grad(out, x, d_out, create_graph=True)[0]
        found.append([out, again, *torch.autograd.grad(out, x, d_out)])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert torch.equal(dropout_relu(x.detach().clone(), 0), x.relu())
    both = torch.autograd.grad(dropout(x, p), x, torch.stack([d_out, -d_out]), is_grads_batched=True)[0]
    torch.testing.assert_close(both[0], -both[1], equal_nan=True)
    read = x.detach().clone()
    dropout_relu(read.requires_grad_().view(-1), 0)
    assert torch.equal(read, x), "a view that is written into has its gradient copied several times"


@pytest.mark.filterwarnings("ignore:Full backward hook")  # encodings need no gradient
@pytest.mark.parametrize("kind", ["own forward", "forward", "full_backward", "full_backward_pre"])
def test_positions_that_are_projected_together_are_those_of_each_layer_and_hooks_are_called(kind):
    model, calls = small_model(n_layer=3), []

    def projected():
        return [own.r for own in model.backbone.positions(7, None, model.backbone.like)]

    together, hooked = projected(), next(iter(model.backbone.layers)).attention.position
    if kind == "own forward":
        plain, hooked.forward = hooked.forward, lambda x: calls.append(1) or plain(x)
    else:
        getattr(hooked, f"register_{kind}_hook")(lambda *_: calls.append(1))
    alone = projected()
    torch.testing.assert_close(together, alone)
    alone[0].sum().backward()
    assert len(calls) == 1
    model.zero_grad()
    together[1].sum().backward()
    gradients = [each.attention.position.weight.grad for each in model.backbone.layers]
    assert [gradient is not None and bool(gradient.any()) for gradient in gradients] == [False, True, False]


@given(p=st.sampled_from([0.25, 0.5]), seed=st.integers(0, 99))
def test_a_word_is_dropped_at_all_its_positions(p, seed):
    torch.manual_seed(seed)
    ids = torch.randint(2000, (3, 4000))
    out = word_dropout(torch.ones(3, 4000, 2), ids, p, 2000)
    dropped = out[..., 0] < 0.1
    assert out[dropped].abs().max() < 1e-5 and torch.equal(out[~dropped], torch.full_like(out[~dropped], 1 / (1 - p)))
    words = [set(ids[where].tolist()) for where in (dropped, ~dropped)]
    assert not words[0] & words[1] and len(words[0]) / len(words[0] | words[1]) == pytest.approx(p, abs=0.06)


def test_a_deep_model_learns_from_rows_that_begin_with_a_dropped_word():
    model = small_model(train=True, n_layer=16, dropout_words=0.9, dtype=torch.float32)
    loss, _, _ = Objective(model)(text(4, 9), text(4, 9), None, lengths(0))
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_dropout_acts_in_training_only_and_at_its_documented_points():
    ids = text(2, 6)
    plain, full = (small_model(**options) for options in ({"share_position_projection": True}, ALL))
    torch.testing.assert_close(read(full, ids, lengths(4)).hidden, read(plain, ids, lengths(4)).hidden)
    for name in ("dropout_words", "dropout_input", "dropout_output"):
        model = small_model(train=True, **{name: 0.5, "locked_dropout": True})
        outputs = [model.backbone(model.embedding(ids), None, lengths(4))[0][-1] for _ in range(2)]
        assert torch.equal(*outputs) == (name == "dropout_output")
    hidden = small_model(train=True, dropout_output=0.5, locked_dropout=True).hidden(ids, None, lengths(4))[0]
    assert torch.equal(hidden == 0, (hidden == 0)[:, :1].expand_as(hidden)) and (hidden == 0).any()


def test_memory_and_segment_are_projected_under_one_mask():
    attention = small_model(train=True, dropout=0.5, locked_dropout=True, n_layer=1).backbone.layers[0].attention
    seen = []
    attention.dropout.register_forward_hook(lambda module, inputs, out: seen.append((inputs[0], out)))
    x = torch.randn(2, 3, 14, dtype=torch.float64)
    bias = torch.zeros(2, 5, dtype=torch.float64)
    attention.positions(torch.randn(7, 14, dtype=torch.float64), bias, bias)
    q, *_ = attention.heads(x, torch.randn(2, 4, 14, dtype=torch.float64))
    attention.add(x, q)
    assert [out.shape[-2] for _, out in seen] == [7, 3, 7, 7, 3]  # positions; q, k, v; what heads give together
    for given_, out in seen:
        ratio = out / given_
        assert torch.allclose(ratio, ratio[..., :1, :].expand_as(ratio))


def test_shared_positions_use_the_tokens_keys_and_the_query_of_distance_0():
    shared, own = small_model(share_position_projection=True), small_model(untie_r=True)
    assert shared.backbone.layers[0].attention.position is None
    state = {name: value.clone() for name, value in shared.state_dict().items()}
    now = torch.cat([torch.zeros(7), torch.ones(7)]).double()  # sines and cosines of distance 0
    biases = []
    for i in range(3):
        q, k, _ = state[f"backbone.layers.{i}.attention.qkv.weight"].chunk(3)
        state[f"backbone.layers.{i}.attention.position.weight"] = k
        biases.append((q @ now).view(2, 5))
    state["backbone.content_bias"] = state["backbone.position_bias"] = torch.stack(biases)
    own.load_state_dict(state)
    ids = text(2, 9)
    torch.testing.assert_close(read(shared, ids, lengths(4)).hidden, read(own, ids, lengths(4)).hidden)
    with torch.no_grad():  # the same with a cache of any content
        cache = shared.empty_cache(2, lengths(4))
        for piece in ids.split(2, dim=1):
            hidden, cache = shared.hidden(piece, cache, lengths(4))
    whole = read(shared, ids, lengths(4), pieces=[2, 2, 2, 2, 1])
    torch.testing.assert_close(hidden, whole.hidden[:, -1:])


def test_regularised_adds_activity_of_the_output_before_dropout():
    model, ids = small_model(train=True, dropout_output=0.5, final_norm=True), text(2, 6)
    targets = ids.clone()
    targets[:, :2] = -1
    torch.manual_seed(1)
    loss, nll, _ = Objective(model)(ids, targets, None, lengths(0))
    torch.manual_seed(1)
    more, same, _ = Objective(model, alpha=0.5, beta=0.25)(ids, targets, None, lengths(0))
    h = read(model.eval(), ids, lengths(0)).hidden[:, 2:]
    penalty = 0.5 * h.square().mean() + 0.25 * (h[:, 1:] - h[:, :-1]).square().mean()
    torch.testing.assert_close(nll, same)
    torch.testing.assert_close(more, loss + penalty)


class Apart(Ranks):
    """Ranks that do not communicate: each has its part of the gradients."""

    def total(self, amounts):
        return list(amounts)


def gradients_of(shape: dict, segment: Segment, config: TrainConfig, ranks: Ranks | None = None) -> list[torch.Tensor]:
    """The gradients of a first step."""
    model, ranks = small_model(train=True, **shape), ranks or Ranks()
    memory = model.empty_memory(len(segment.ids) // ranks.size, config.lengths)
    train_step(model, [torch.optim.SGD(model.parameters())], segment, memory, config, 0, ranks=ranks)
    return [p.grad for p in model.parameters() if p.grad is not None]


@settings(max_examples=examples(5))
@given(counts=st.lists(st.integers(0, 7), min_size=4, max_size=4), loss=st.sampled_from(["full", "half"]))
@example(counts=[6, 6, 2, 2], loss="full")
@example(counts=[0, 0, 0, 0], loss="full")
@example(counts=[1, 1, 1, 1], loss="full")
@pytest.mark.parametrize(
    ("shape", "terms"),
    [({}, {"ar_alpha": 0.7, "tar_beta": 0.9}), ({"kind": "al-rfou", "positions": 9}, {})],
    ids=["AR and TAR", "Al-Rfou"],
)
def test_gradients_do_not_depend_on_chunks_or_ranks(shape, terms, counts, loss):
    ids, targets = text(4, 7), text(4, 7, seed=1)
    targets[torch.arange(7) >= torch.tensor(counts)[:, None]] = -1
    config = TrainConfig(tgt_len=7, mem_len=0, batch_size=4, clip=0, device="cpu", precision="fp32", loss=loss, **terms)
    whole, *dealt = (
        gradients_of(shape, Segment(ids[order], targets[order], None), replace(config, batch_chunk=chunks))
        for chunks, order in ((1, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (2, [2, 0, 3, 1]), (4, [0, 1, 2, 3]))
    )
    one, other = (gradients_of(shape, Segment(ids, targets, None), config, Apart(rank, 2)) for rank in (0, 1))
    dealt.append([(a + b) / 2 for a, b in zip(one, other, strict=True)])
    for found in dealt:  # float64: sums in another order
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-11)


@given(rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), min_size=1, max_size=5))
def test_half_loss_trains_on_the_recent_half_of_each_rows_own_targets(rows):
    targets = torch.full((len(rows), 105), -1)
    for row, (again, count) in zip(targets, rows, strict=True):
        row[again : again + count] = torch.arange(count)
    for row, (_, count) in zip(trained_targets(targets, "half"), rows, strict=True):
        assert row[row >= 0].tolist() == list(range(count // 2, count))
