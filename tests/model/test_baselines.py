"""Transformers with other positions: properties they share with Transformer-XL, and their formulas by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from small_models import BASELINES as KINDS
from small_models import lengths, read, small_model, text
from torch import Tensor, nn

from transformer_xl.config.settings import Lengths
from transformer_xl.ops import BACKENDS


def made(train: bool = False, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A small model in which weights that start at 0 have other values."""
    model = small_model(train=train, dtype=dtype, **changes)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    return model


# Shaw's attention


def by_hand(model: Any, layer: int, x: Tensor, mem: int, call: Lengths) -> Tensor:
    """The sublayer's output before the residual, for one row; the last len(x) - mem positions are queries."""
    attention, config = model.backbone.layers[layer].attention, model.config
    q, k, v = attention.qkv(x).unflatten(-1, (3, config.n_head, config.d_head)).unbind(-3)
    distance = torch.arange(mem, len(x))[:, None] - torch.arange(len(x))
    farthest = config.positions - 1 if call.clamp_len is None else min(config.positions - 1, call.clamp_len)
    table = model.backbone.distances[layer].flip(0)  # from distance 0 on
    score = torch.einsum("thk,tshk->hts", q[mem:], k + table[distance.clamp(0, farthest)]) / config.d_head**0.5
    hidden = (distance < 0) | (distance >= (call.attn_len or len(x)))
    share = score.masked_fill(hidden, -torch.inf).softmax(-1)
    return attention.output(torch.einsum("hts,shk->thk", share, v).flatten(1))


@pytest.mark.parametrize("call", [lengths(9), lengths(9, clamp_len=3), lengths(9, 4)], ids=["plain", "clamp", "window"])
@pytest.mark.parametrize("backend", sorted(BACKENDS.keys() - {"triton", "native"}))
def test_shaw_by_hand(call: Lengths, backend: str) -> None:
    model = made(kind="shaw", positions=6, pre_lnorm=True)
    for layer in model.backbone.layers:
        layer.attention.backend = backend
    ids = text(1, 11)
    memory = read(model, ids[:, :6], call).memory
    with torch.no_grad():
        for number, layer in enumerate(model.backbone.layers):
            layer.feed_forward.outer.weight.zero_(), layer.feed_forward.outer.bias.zero_()
            after = read(model, ids[:, 6:], call, memory=memory)
            x = torch.cat([memory.layers[number], after.memory.layers[number][:, -5:]], 1)
            outputs = [*(m[:, -5:] for m in after.memory.layers[1:]), after.hidden]
            found = outputs[number] - x[:, 6:]
            torch.testing.assert_close(found[0], by_hand(model, number, layer.attention.norm(x)[0], 6, call))


# Absolute positions


def encoder_of(model: Any) -> nn.TransformerEncoder:
    """PyTorch's layers with these weights."""
    config = model.config
    one = nn.TransformerEncoderLayer(
        config.d_model, config.n_head, config.d_inner, 0.0, batch_first=True, norm_first=config.pre_lnorm
    )
    encoder = nn.TransformerEncoder(one, config.n_layer, enable_nested_tensor=False).double().eval()
    with torch.no_grad():
        for theirs, ours in zip(encoder.layers, model.backbone.layers, strict=True):
            attention, feed = ours.attention, ours.feed_forward
            for bias in (theirs.self_attn.in_proj_bias, theirs.self_attn.out_proj.bias):
                bias.zero_()
            theirs.self_attn.in_proj_weight.copy_(attention.qkv.weight)
            theirs.self_attn.out_proj.weight.copy_(attention.output.weight)
            for a, b in (
                (theirs.norm1, attention.norm),
                (theirs.linear1, feed.inner),
                (theirs.linear2, feed.outer),
                (theirs.norm2, feed.norm),
            ):
                a.load_state_dict(b.state_dict())
    return encoder


@pytest.mark.parametrize("pre_lnorm", [False, True])
def test_vaswani_equals_pytorchs_transformer(pre_lnorm: bool) -> None:
    model, ids = made(kind="vaswani", d_head=7, pre_lnorm=pre_lnorm), text(3, 11)
    x = model.embedding(ids) + torch.tensor(np.stack([oracle.encoding(position, 14) for position in range(11)]))
    expected = encoder_of(model)(x, mask=nn.Transformer.generate_square_subsequent_mask(11).double(), is_causal=True)
    torch.testing.assert_close(read(model, ids, lengths(0)).hidden, expected.detach())


def test_al_rfou_adds_a_vector_before_each_of_pytorchs_layers() -> None:
    model, ids = made(d_head=7, **KINDS["al-rfou"]), text(3, 11)
    x, mask = model.embedding(ids), nn.Transformer.generate_square_subsequent_mask(11).double()
    for layer, table in zip(encoder_of(model).layers, model.backbone.places, strict=True):
        x = layer(x + table[:11], src_mask=mask)
    torch.testing.assert_close(read(model, ids, lengths(0)).hidden, x.detach())


@pytest.mark.parametrize("kind", ["vaswani", "al-rfou"])
def test_memory_keeps_the_positions_of_its_segment(kind: str) -> None:
    model, ids, call = made(**KINDS[kind]), text(1, 9), lengths(9)
    first = read(model, ids[:, :5], call)
    after = read(model, ids[:, 5:], call, memory=first.memory)
    torch.testing.assert_close(after.memory.layers[0][:, :5], first.memory.layers[0], rtol=0, atol=0)
    fresh = read(model, ids[:, 5:], call)
    torch.testing.assert_close(after.memory.layers[0][:, 5:], fresh.memory.layers[0], rtol=0, atol=0)
    assert not torch.isclose(after.hidden, fresh.hidden).all(-1).any(), "memory is read"
