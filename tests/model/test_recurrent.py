"""The recurrent baselines equal PyTorch's LSTM and a loop over the QRNN's equations, for any segmentation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import lengths, read, score, small_model, text
from torch import nn

from transformer_xl.config.settings import TransformerXLConfig
from transformer_xl.mistake import Mistake
from transformer_xl.model.baselines import build_model
from transformer_xl.model.baselines.recurrent import Recurrent
from transformer_xl.runtime.device import autocast
from transformer_xl.train.objective import Objective

KINDS = ["lstm", "qrnn"]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer": {"n_layer": 1},
    "bands": {"cutoffs": (5, 11), "div_val": 2, "d_embed": 12, "tie_projs": (False, True, True)},
}
DROPOUTS = {"dropout": 0.3, "dropout_words": 0.2, "dropout_input": 0.4, "dropout_output": 0.1, "weight_drop": 0.5}
LONG = lengths(1)


def small(kind: str, *, train: bool = False, dtype: torch.dtype = torch.float64, **changes: Any) -> Recurrent:
    model = small_model(kind=kind, train=train, dtype=dtype, **changes)
    assert isinstance(model.backbone, Recurrent)
    with torch.no_grad():  # large enough to make every influence visible
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def by_hand_lstm(model: Recurrent, x: torch.Tensor) -> torch.Tensor:
    for layer in model.backbone.layers:
        plain = nn.LSTM(layer.cell.input_size, layer.cell.hidden_size, batch_first=True).double()
        plain.load_state_dict(layer.cell.state_dict())
        x, _ = plain(x)
    return x


def by_hand_qrnn(model: Recurrent, x: torch.Tensor) -> torch.Tensor:
    for number, layer in enumerate(model.backbone.layers):
        c, before, out = 0.0, torch.zeros_like(x[:, 0]), []
        for x_t in x.unbind(1):
            seen = torch.cat([x_t, before], -1) if number == 0 else x_t
            z, f, o = (seen @ layer.linear.weight.T + layer.linear.bias).chunk(3, -1)
            c = f.sigmoid() * c + (1 - f.sigmoid()) * z.tanh()
            out.append(o.sigmoid() * c)
            before = x_t
        x = torch.stack(out, 1)
    return x


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "by_hand"), [("lstm", by_hand_lstm), ("qrnn", by_hand_qrnn)])
def test_outputs_and_gradients_follow_the_equations(kind, by_hand, shape):
    model = small(kind, **SHAPES[shape])
    ids = text(3, 9)
    x = model.embedding(ids)
    assert model.embedding.scale == 1.0  # sqrt(d_model) is for attention
    got, want = (f(x) for f in (lambda x: model.backbone(x, None, LONG)[0][-1], lambda x: by_hand(model, x)))
    torch.testing.assert_close(got, want)
    if kind == "qrnn":
        weights = list(model.backbone.layers.parameters())
        grads = [torch.autograd.grad(out.square().sum(), weights, retain_graph=True) for out in (got, want)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(15))
@given(pieces=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_the_segmentation_changes_nothing(kind, pieces):
    model, ids = small(kind), text(2, sum(pieces))
    whole, cut = read(model, ids, LONG), read(model, ids, LONG, pieces=pieces)
    torch.testing.assert_close(cut.hidden, whole.hidden)
    torch.testing.assert_close(cut.memory.layers, whole.memory.layers)


@pytest.mark.parametrize("kind", KINDS)
def test_without_memory_each_segment_starts_from_zeros(kind):
    model, ids = small(kind), text(2, 6)
    apart = torch.cat([read(model, ids[:, i : i + 3], LONG).hidden for i in (0, 3)], 1)
    torch.testing.assert_close(read(model, ids, lengths(0), pieces=[3, 3]).hidden, apart)


@pytest.mark.parametrize("changes", [{"kind": "lstm"}, {"kind": "qrnn"}, {"zero_memory": True}], ids=str)
def test_rows_of_unequal_lengths_are_refused(changes):
    with pytest.raises(Mistake, match="Give rows of one length"):
        small_model(**changes).empty_memory(2, LONG, torch.tensor([0, -1]))


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_close(kind):
    model, ids = small(kind, dtype=torch.float32), text(2, 8)
    exact = score(model, ids, LONG)
    with autocast("bf16", torch.device("cpu")):
        rounded = score(model.for_inference("bf16"), ids, LONG, pieces=[6, 2])
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=0.3)  # eight bits, through three layers
    half = small(kind, dtype=torch.bfloat16)
    torch.testing.assert_close(score(half, ids, LONG, pieces=[6, 2]).float(), exact, rtol=0, atol=0.3)
    model.train()
    with autocast("bf16", torch.device("cpu")):
        loss, _, after = Objective(model)(ids, ids, None, LONG)
    loss.backward()
    assert all(layer.dtype == torch.float32 for layer in after.layers)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_acts_in_training_only_and_not_on_the_state(kind):
    ids = text(2, 8)
    plain, dropping = small(kind), small(kind, **DROPOUTS)
    torch.testing.assert_close(score(dropping, ids, LONG), score(plain, ids, LONG), rtol=0, atol=0)
    for name in DROPOUTS:
        model = small(kind, train=True, **{name: DROPOUTS[name]})
        if name != "dropout_output":
            assert not torch.equal(
                model.backbone(model.embedding(ids), None, LONG)[0][-1], plain.hidden(ids, None, LONG)[0]
            )
        assert not torch.equal(score(model, ids, LONG), score(model, ids, LONG)), name


@pytest.mark.parametrize("kind", KINDS)
def test_initial_values(kind):
    model = build_model(TransformerXLConfig(kind=kind, vocab_size=500, n_layer=2, d_model=20, d_inner=30))
    table = model.embedding.tables[0]
    assert table.abs().max() <= 0.1 < table.abs().max() * 1.01 and model.softmax.bias.eq(0).all()
    assert model.softmax.tables[0] is table
    width = 30 if kind == "lstm" else 2 * 20
    for parameter in model.backbone.layers[0].parameters():
        assert 0.8 * width**-0.5 < parameter.abs().max() <= width**-0.5
