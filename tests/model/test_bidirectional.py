"""`BidirectionalAttention` against the sublayers of Wav2Vec2Conformer and XLNet, and its laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from transformer_xl.mistake import Mistake
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


@settings(max_examples=examples(20))
@given(
    pieces=st.lists(st.integers(1, 5), min_size=1, max_size=5), look_ahead=st.integers(0, 4), attn_len=st.integers(1, 6)
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


def test_half_precision_knows_each_distance() -> None:
    """It cannot represent distances above 256, so the encodings are computed in fp32."""
    attention = small()
    torch.nn.init.normal_(attention.position_bias, std=3)
    torch.nn.init.normal_(attention.position.weight, std=0.7)
    attention = attention.bfloat16()
    exact, x = small().double(), torch.randn(1, 700, WIDTH).bfloat16()
    exact.load_state_dict(attention.state_dict())
    with torch.no_grad():
        found, expected = attention(x).double(), exact(x.double())
    assert (found - expected).norm() < 0.05 * (expected - exact.output.bias).norm()
    assert attention(x[:, :0]).shape == (1, 0, WIDTH), "and no vectors have none"


def test_dropout_is_for_training_and_bf16_works() -> None:
    attention = small(dropatt=0.5).float()
    x = torch.randn(2, 7, WIDTH)
    assert torch.equal(attention(x), attention(x))
    assert not torch.equal(attention.train()(x), attention(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(x).isfinite().all()


def scores_by_index(attention: BidirectionalAttention, x: Tensor, seen: Tensor, start: int = 0) -> Tensor:
    """The output of the shifts "none" and "legacy", score by score."""
    rows, length, heads = *x.shape[:2], attention.n_head
    q, k, v = (each.unflatten(-1, (heads, -1)) for each in (attention.query(x), *attention.key_value(x).chunk(2, -1)))
    longest = max(length, bidirectional.LEGACY_LENGTH)
    table = {"none": torch.arange(length) + start, "legacy": longest - 1 - torch.arange(length)}[attention.shift]
    p = attention.position(attention.encode(table.to(x.dtype), WIDTH)).unflatten(-1, (heads, -1))
    out = torch.empty(rows, length, heads, q.shape[-1], dtype=x.dtype)
    for row in range(rows):
        for head in range(heads):
            score = (q[row, :, head] + attention.content_bias[head]) @ k[row, :, head].mT
            for i in range(length):
                for j in range(length):
                    query, column = (i, j) if attention.shift == "none" else (i, length - 1 - i + j)
                    if column > length:  # the shift reads the next query's row
                        query, column = i + 1, j - i - 2
                    if column < length:
                        score[i, j] += (q[row, query, head] + attention.position_bias[head]) @ p[column, head]
            score = (score / q.shape[-1] ** 0.5).masked_fill(~seen[row], -torch.inf)
            out[row, :, head] = score.softmax(-1) @ v[row, :, head]
    return attention.output(out.flatten(2))


@pytest.mark.parametrize("shift", ["none", "legacy"])
@torch.no_grad()
def test_other_shifts_are_what_their_indices_say(shift: str) -> None:
    attention = small(shift=shift, encode=interleaved_sinusoids)
    x, end = torch.randn(3, 7, WIDTH, dtype=torch.float64), torch.tensor([7, 5, 2])
    seen = (torch.arange(7) < end[:, None])[:, None].expand(3, 7, 7)
    expected, found = scores_by_index(attention, x, seen), attention(x, end=end)
    for row, count in enumerate(end):
        torch.testing.assert_close(found[row, :count], expected[row, :count])
    near = (torch.arange(7) - torch.arange(7)[:, None]).abs() <= 2
    found = attention(x, attn_len=3, look_ahead=2)
    torch.testing.assert_close(found, scores_by_index(attention, x, near.expand(3, 7, 7)))


@settings(max_examples=examples(20))
@given(
    length=st.integers(1, 12),
    size=st.integers(1, 5),
    before=st.integers(0, 3),
    shift=st.sampled_from(["relative", "none"]),
)
@torch.no_grad()
def test_chunks_at_once_equal_a_stream_of_chunks(length: int, size: int, before: int, shift: str) -> None:
    """The past is the last chunks, each padded row has its own end, and `start` is the position in the utterance."""
    attention = small(shift=shift)
    x = torch.randn(2, length, WIDTH, dtype=torch.float64)
    for end in (length, (length + 1) // 2):
        whole = attention.in_chunks(x, size, before, end=torch.tensor([length, end]))
        for row, own in ((0, length), (1, end)):
            for start in range(0, own, size):
                past, new = (
                    x[row : row + 1, max(start - before * size, 0) : start],
                    x[row : row + 1, start:own][:, :size],
                )
                out = attention(new, past, start=start if shift == "none" else 0)
                torch.testing.assert_close(out[0], whole[row, start : start + size][: out.shape[1]])


def test_parakeets_weights_have_seven_other_names() -> None:
    parakeet = pytest.importorskip("transformers.models.parakeet.modeling_parakeet")
    torch.manual_seed(0)
    config = parakeet.ParakeetEncoderConfig(hidden_size=16, num_attention_heads=4, attention_bias=True)
    config._attn_implementation = "eager"
    theirs = parakeet.ParakeetEncoderAttention(config, 0).eval()
    for bias in (theirs.bias_u, theirs.bias_v):
        torch.nn.init.normal_(bias)
    x, mask = torch.randn(2, 9, 16), torch.ones(2, 1, 9, 9, dtype=torch.bool)
    mask[1, :, :, 6:] = False
    encodings = parakeet.ParakeetEncoderRelPositionalEncoding(config)(x)
    ours = BidirectionalAttention.from_conformer(theirs.state_dict())
    ours.encode = lambda *_: encodings[0]
    with torch.no_grad():
        expected, found = theirs(x, encodings, mask)[0], ours(x, end=torch.tensor([9, 6]))
    assert (found - expected)[mask[:, 0, 0]].abs().max() < 2e-6


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda x: small(shift="rel"), "shift must be relative, none or legacy, got 'rel'"),
        (lambda x: small(shift="legacy")(x, attn_len=0), "attn_len must be at least 1"),
        (lambda x: small(shift="legacy")(x, end=torch.tensor([1])), "end must be a"),
        (lambda x: small(shift="legacy")(x, start=3), "start must be left out with shift = legacy"),
        (lambda x: small(shift="none", backend="strided"), "backend must be auto with shift = none"),
        (lambda x: small(shift="legacy")(x, x), "past must be None with shift = legacy, got 3"),
        (lambda x: small(shift="legacy").in_chunks(x, 2, 1), "in_chunks must have size"),
        (lambda x: small().in_chunks(x, 0, 1), "in_chunks must have size"),
        (lambda x: small().in_chunks(x, 2, 1, end=torch.tensor([1])), r"end must be a number for each of 2 rows"),
        (lambda x: BidirectionalAttention(15, 3, 5), "d_model must be even, .* got 15"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, told: str) -> None:
    with pytest.raises(Mistake, match=told):
        call(torch.randn(2, 3, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize("shift", ["relative", "none", "legacy"])
def test_nothing_attends_to_nothing(shift: str) -> None:
    attention, x = small(shift=shift), torch.randn(2, 0, WIDTH, dtype=torch.float64)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            assert attention(x).shape == x.shape
    if shift != "legacy":
        assert attention.in_chunks(x, 3, 1).shape == x.shape
