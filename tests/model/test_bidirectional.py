"""`BidirectionalAttention` against the sublayers of Wav2Vec2Conformer and XLNet, and its laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from transformer_xl.model import bidirectional
from transformer_xl.model.attention import sines_then_cosines
from transformer_xl.model.bidirectional import BidirectionalAttention, interleaved_sinusoids

WIDTH, HEADS, LENGTH = 14, 2, 13


@pytest.fixture(scope="module")
def peers():
    pytest.importorskip("transformers", minversion="5", reason="needs pip install 'transformers>=5'")
    from benchmarks.bidirectional import PEERS

    return PEERS


def table_of(peer: str) -> Tensor:
    """The encodings of a peer, which it computes in float32 with other roundings than ours."""
    from benchmarks.bidirectional import (
        Wav2Vec2ConformerConfig,
        Wav2Vec2ConformerRelPositionalEmbedding,
        XLNetConfig,
        XLNetModel,
    )

    if peer == "XLNet":
        model = XLNetModel(XLNetConfig(vocab_size=1, d_model=WIDTH, n_head=HEADS, n_layer=0, d_inner=1))
        return model.relative_positional_encoding(LENGTH, LENGTH)[1:, 0]  # its first row is never used
    config = Wav2Vec2ConformerConfig(hidden_size=WIDTH, num_attention_heads=HEADS, max_source_positions=8)
    return Wav2Vec2ConformerRelPositionalEmbedding(config)(torch.zeros(1, LENGTH, WIDTH))[0]


def gradients(module: torch.nn.Module, call: Any, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    """The output, and gradients of the input and of the weights by name; unused weights are left out."""
    out = call(x)
    named = {"input": x} | dict(module.named_parameters())
    found = torch.autograd.grad(out, list(named.values()), cotangent, allow_unused=True)
    return {"out": out.detach()} | {n: g for n, g in zip(named, found, strict=True) if g is not None}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("peer", ["Wav2Vec2Conformer", "Wav2Vec2Conformer, eager", "XLNet"])
def test_output_and_gradients_equal_those_of(peer: str, dtype: torch.dtype, tolerance: float, peers) -> None:
    """The truth is the peer in float64. An error is a share of the largest number of its tensor."""
    torch.manual_seed(0)
    module, call = peers[peer](WIDTH, HEADS)
    module = module.double()
    table = table_of(peer).to(dtype)
    convert = BidirectionalAttention.from_xlnet if peer == "XLNet" else BidirectionalAttention.from_conformer
    ours = convert(module.state_dict()).to(dtype)
    ours.encode = lambda *_: table
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn_like(x)
    truth = gradients(module, call, x, cotangent)
    found = gradients(ours, ours, x.detach().to(dtype).requires_grad_(), cotangent.to(dtype))
    expected = convert(truth).state_dict() | {name: truth[name] for name in ("out", "input")}
    assert found.keys() == expected.keys()
    for name, value in found.items():
        error = (value.double() - expected[name]).abs().max() / expected[name].abs().max()
        # The gradient of keys' biases is 0 up to rounding: a constant added to all scores changes no probability.
        if name == "key_value.bias":
            half = len(value) // 2
            assert value[:half].abs().max() < 100 * tolerance
            error = (value[half:].double() - expected[name][half:]).abs().max() / expected[name].abs().max()
        assert error < tolerance, f"{name}: {error:.2g}"


@pytest.mark.parametrize(
    ("peer", "encode"), [("Wav2Vec2Conformer", interleaved_sinusoids), ("XLNet", sines_then_cosines)]
)
def test_encodings_equal_those_of(peer: str, encode: bidirectional.Encode, peers) -> None:
    distance = torch.arange(LENGTH - 1, -LENGTH, -1, dtype=torch.float64)
    # Frequencies in float32 are wrong by some units of roundoff, 6e-8, and angles by that times the distance.
    torch.testing.assert_close(table_of(peer).double(), encode(distance, WIDTH), rtol=0, atol=1e-5)


def small(**options: Any) -> BidirectionalAttention:
    torch.manual_seed(1)
    module = BidirectionalAttention(WIDTH, HEADS, 5, **options).double().eval()
    for bias in (module.content_bias, module.position_bias):
        torch.nn.init.normal_(bias)
    return module


@settings(max_examples=examples(20), deadline=None)
@given(
    pieces=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    look_ahead=st.integers(0, 4),
    attn_len=st.integers(1, 6),
)
@torch.no_grad()
def test_a_stream_with_look_ahead_equals_the_whole(pieces: list[int], look_ahead: int, attn_len: int) -> None:
    attention, length = small(), sum(pieces)
    x = torch.randn(2, length, WIDTH, dtype=torch.float64)
    whole = attention(x, attn_len=attn_len, look_ahead=look_ahead)
    start = 0
    for size in pieces:
        past, new = x[:, max(start - attn_len + 1, 0) : start], x[:, start : start + size + look_ahead]
        out = attention(new, past, attn_len=attn_len, look_ahead=look_ahead)[:, :size]
        torch.testing.assert_close(out, whole[:, start : start + size])
        start += size


@torch.no_grad()
def test_a_row_does_not_depend_on_its_padding_and_its_neighbours() -> None:
    attention = small(norm_epsilon=1e-5)
    x = torch.randn(3, 7, WIDTH, dtype=torch.float64)
    out = attention(x, end=torch.tensor([7, 4, 1]))
    for row, end in enumerate((7, 4, 1)):
        torch.testing.assert_close(out[row : row + 1, :end], attention(x[row : row + 1, :end]))


def test_dropout_is_for_training_and_bf16_works() -> None:
    attention = small(dropatt=0.5).float()
    x = torch.randn(2, 7, WIDTH)
    assert torch.equal(attention(x), attention(x))
    assert not torch.equal(attention.train()(x), attention(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(x).isfinite().all()
