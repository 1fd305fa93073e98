"""The model against a forward pass in NumPy, its losses and its initial weights."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import VARIANTS, VOCAB, inputs_of, layers_of, lengths, read, small_model, text
from torch import nn

from transformer_xl.data.vocab import Vocab
from transformer_xl.evaluation.score import Tempered
from transformer_xl.evaluation.sliding import Sliding
from transformer_xl.model.attention import sinusoids
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.train.objective import Objective

each_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


class ByHand:
    """A post-norm model with a plain softmax, one row and one query at a time; no batch, no shift, no masks."""

    def __init__(self, model: TransformerXL):
        self.config = model.config
        self.weights = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        deviation = np.sqrt(x.var() + self.config.layer_norm_epsilon)
        return (x - x.mean()) / deviation * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def encoding(self, distance: int, clamp_len: int | None) -> np.ndarray:
        d_model = self.config.d_model
        distance = distance if clamp_len is None else min(distance, clamp_len)
        angles = [distance / 10000 ** (2 * i / d_model) for i in range(d_model // 2)]
        return np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])

    def attend(self, layer: int, x: np.ndarray, keys: list[np.ndarray], clamp_len: int | None) -> np.ndarray:
        name, size = f"backbone.layers.{layer}.attention", self.config.d_head
        u, v = (
            self.weights[bias][layer if self.config.untie_r else 0]
            for bias in ("backbone.content_bias", "backbone.position_bias")
        )
        w_q, w_k, w_v = np.split(self.weights[f"{name}.qkv.weight"], 3)
        heads = []
        for head in range(self.config.n_head):
            rows = slice(head * size, (head + 1) * size)
            query, scores = w_q[rows] @ x, []
            for j, key in enumerate(keys):
                r = self.weights[f"{name}.position.weight"][rows] @ self.encoding(len(keys) - 1 - j, clamp_len)
                scores.append(((query + u[head]) @ (w_k[rows] @ key) + (query + v[head]) @ r) / math.sqrt(size))
            share = np.exp(np.array(scores) - max(scores))
            heads.append(sum(s * (w_v[rows] @ key) for s, key in zip(share / share.sum(), keys, strict=True)))
        return self.norm(x + self.weights[f"{name}.output.weight"] @ np.concatenate(heads), f"{name}.norm")

    def feed(self, layer: int, x: np.ndarray) -> np.ndarray:
        w, name = self.weights, f"backbone.layers.{layer}.feed_forward"
        inner = np.maximum(w[f"{name}.inner.weight"] @ x + w[f"{name}.inner.bias"], 0)
        return self.norm(x + w[f"{name}.outer.weight"] @ inner + w[f"{name}.outer.bias"], f"{name}.norm")

    def log_probs(self, ids: list[int], pieces: list[int], call) -> np.ndarray:
        """[T, V] of one row, read in segments; memory is a list of layer inputs for each layer."""
        memory: list[list[np.ndarray]] = [[] for _ in range(self.config.n_layer)]
        out, start = [], 0
        for size in pieces:
            x = [
                self.weights["embedding.tables.0"][i] * math.sqrt(self.config.d_model)
                for i in ids[start : start + size]
            ]
            start += size
            for layer, past in enumerate(memory):
                context = past + x
                seen = [context[: len(past) + i + 1][-(call.attn_len or len(context)) :] for i in range(size)]
                past[:] = context[max(0, len(context) - call.mem_len) :]
                x = [
                    self.feed(layer, self.attend(layer, y, keys, call.clamp_len))
                    for y, keys in zip(x, seen, strict=True)
                ]
            logits = [self.weights["softmax.tables.0"] @ y + self.weights["softmax.bias"] for y in x]
            out += [logit - np.log(np.exp(logit).sum()) for logit in logits]
        return np.stack(out)


@pytest.mark.parametrize("untie_r", [False, True])
@pytest.mark.parametrize(
    "call", [lengths(3), lengths(7, clamp_len=4), lengths(5, 4), lengths(0)], ids=["memory", "clamp", "window", "none"]
)
def test_log_probabilities_by_hand(call, untie_r: bool) -> None:
    model, pieces = small_model(untie_r=untie_r), [2, 5, 1, 3]
    nn.init.normal_(model.softmax.bias)
    ids, found, memory, start = text(1, 11), [], None, 0
    for size in pieces:
        out, memory = model.log_probs(ids[:, start : start + size], memory, call)
        found.append(out[0].detach())
        start += size
    expected = ByHand(model).log_probs(ids[0].tolist(), pieces, call)
    torch.testing.assert_close(torch.cat(found), torch.from_numpy(expected))


def test_pre_norm_normalises_the_input_of_a_sublayer() -> None:
    # Sublayers with zero output do not change the embedding with pre-norm, and normalise it six times with post-norm.
    for pre_lnorm in (True, False):
        model, ids = small_model(pre_lnorm=pre_lnorm), text(2, 5)
        for layer in layers_of(model):
            for silent in (layer.attention.output.weight, layer.feed_forward.outer.weight):
                nn.init.zeros_(silent)
        x = model.embedding(ids)
        if not pre_lnorm:
            for layer in layers_of(model):
                x = layer.feed_forward.norm(layer.attention.norm(x))
        torch.testing.assert_close(read(model, ids, lengths(3)).hidden, x.detach())
    # Scaling x does not change the normalised input of a sublayer (except for epsilon); it changes the residual.
    model = small_model(pre_lnorm=True, n_layer=1, layer_norm_epsilon=1e-12)
    ids = text(2, 5)
    plain, x = read(model, ids, lengths(3), pieces=[2, 3]).hidden, model.embedding(ids).detach()
    nn.init.zeros_(layers_of(model)[0].feed_forward.outer.weight)
    attended = read(model, ids, lengths(3), pieces=[2, 3]).hidden - x
    model.embedding.scale *= 100
    torch.testing.assert_close(read(model, ids, lengths(3), pieces=[2, 3]).hidden - 100 * x, attended)
    assert not torch.isclose(plain, x + attended).all(-1).any()


@torch.no_grad()
def test_qk_norm_normalises_queries_and_keys_of_each_head() -> None:
    attention, plain = (layers_of(small_model(qk_norm=on))[0].attention for on in (True, False))
    attention.qk_norm.fill_(1.7)
    plain.load_state_dict(attention.state_dict(), strict=False)
    x, past = torch.randn(2, 2, 4, 14, dtype=torch.float64).unbind()
    (q, k, v), (raw_q, raw_k, raw_v) = attention.heads(x, past), plain.heads(x, past)

    def standard(heads: torch.Tensor) -> torch.Tensor:
        centred = heads - heads.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    torch.testing.assert_close((q, k, v), (1.7 * standard(raw_q), standard(raw_k), raw_v))


def test_a_final_norm_is_after_the_last_layer() -> None:
    model = small_model(pre_lnorm=True, final_norm=True)
    ids, norm = text(2, 5), model.backbone.final_norm
    assert norm is not None
    found = read(model, ids, lengths(3)).hidden
    model.backbone.final_norm = None
    torch.testing.assert_close(found, norm(read(model, ids, lengths(3)).hidden).detach())


def test_with_untie_r_each_layer_has_its_biases() -> None:
    model, ids, call = small_model(untie_r=True), text(1, 5), lengths(7)
    before = read(model, ids, call).memory
    with torch.no_grad():
        model.backbone.content_bias[1] += 1
    after = read(model, ids, call).memory
    torch.testing.assert_close(after.layers[:2], before.layers[:2], rtol=0, atol=0)
    assert not torch.isclose(after.layers[2][:, 1:], before.layers[2][:, 1:]).all(-1).any()


def test_sinusoids_by_hand() -> None:
    # d_model 4: frequencies 1 and 1/100; one half after the other; the last row is distance 0.
    expected = [[math.sin(d), math.sin(d / 100), math.cos(d), math.cos(d / 100)] for d in (2, 2, 1, 0)]
    found = sinusoids(4, 4, clamp_len=2, dtype=torch.float64)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinusoids_are_rounded_once(dtype: torch.dtype) -> None:
    # bfloat16 has no odd integers beyond 256, so distances must be exact before their sine is rounded.
    exact = sinusoids(3001, 6, dtype=torch.float64)
    torch.testing.assert_close(
        sinusoids(3001, 6, dtype=dtype), exact.to(dtype), rtol=0, atol=2 * torch.finfo(dtype).eps
    )


@each_variant
def test_probabilities_sum_to_one(variant: dict) -> None:
    model = small_model(**variant)
    found, memory = model.log_probs(text(2, 5), None, lengths(7))
    assert found.shape == (2, 5, VOCAB)
    torch.testing.assert_close(found.double().exp().sum(-1), torch.ones(2, 5, dtype=torch.float64))
    for last in (1, 3, 5):
        some, after = model.log_probs(text(2, 5), None, lengths(7), last)
        torch.testing.assert_close(some, found[:, -last:])
        torch.testing.assert_close(after.layers, memory.layers)


@each_variant
def test_a_loss_belongs_to_its_target(variant: dict) -> None:
    model, ids, targets = small_model(**variant), text(3, 7), text(3, 7, seed=1)
    targets[1, 2:5] = targets[2, 6] = -1
    nll, memory = model(ids, targets, None, lengths(5))
    log_probs, _ = model.log_probs(ids, None, lengths(5))
    scored = targets >= 0
    expected = -log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * scored
    torch.testing.assert_close(nll, expected, check_dtype=False)
    assert (nll[~scored] == 0).all()

    rows = torch.tensor([2, 0, 1])
    torch.testing.assert_close(model(ids[rows], targets[rows], None, lengths(5))[0], nll[rows])
    other = targets.clone()
    other[1, 5] = (other[1, 5] + 9) % VOCAB
    changed = ~torch.isclose(model(ids, other, None, lengths(5))[0], nll)
    assert changed.nonzero().tolist() == [[1, 5]]

    mean, losses, after = Objective(model)(ids, targets, None, lengths(5))
    torch.testing.assert_close(losses, nll)
    torch.testing.assert_close(mean, nll[scored].mean())
    torch.testing.assert_close(after.layers, memory.layers)


def gradients(model: TransformerXL, loss: torch.Tensor) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()))
    return [gradient.to_dense() if gradient.is_sparse else gradient for gradient in found]


@each_variant
def test_unscored_targets_have_no_gradient(variant: dict) -> None:
    model, ids, targets = small_model(**variant), text(1, 7), text(1, 7, seed=1)
    targets[0, 3:] = -1
    whole = gradients(model, model(ids, targets, None, lengths(5))[0].sum())
    part = gradients(model, model(ids[:, :3], targets[:, :3], None, lengths(5))[0].sum())
    torch.testing.assert_close(whole, part)
    mean, _, _ = Objective(model)(ids, torch.full_like(targets, -1), None, lengths(5))
    assert float(mean.detach()) == 0, "a chunk may hold nothing but padding"
    assert not any(gradient.any() for gradient in gradients(model, mean))


@each_variant
@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_has_a_gradient_for_any_tokens(variant: dict, tied: bool) -> None:
    changes: dict[str, Any] = {} if tied else {"tie_weight": False, "tie_projs": ()}
    for words in ([0, 1, 2], [22, 21, 20]):
        model = small_model(train=True, **variant | changes)
        ids = torch.tensor([words])
        Objective(model)(ids, ids, None, lengths(5))[0].backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_float32(dtype: torch.dtype) -> None:
    for variant in VARIANTS.values():
        model, ids = small_model(dtype=dtype, **variant), text(2, 5)
        mean, nll, _ = Objective(model)(ids, ids, None, lengths(3))
        assert (mean.dtype, nll.dtype) == (torch.float32, torch.float32)


@each_variant
def test_bfloat16_by_autocast_is_close(variant: dict) -> None:
    model, ids = small_model(dtype=torch.float32, init_std=0.1, **variant), text(2, 9)
    memory, rough = None, None
    for piece in ids.split(3, 1):
        nll, memory = model(piece, piece, memory, lengths(5))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, rough = model(piece, piece, rough, lengths(5))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, nll, rtol=0.05, atol=0.05)


@each_variant
def test_dropout_is_for_training_and_memory_holds_its_results(variant: dict) -> None:
    model, ids, call = small_model(train=True, dropout=0.5, dropatt=0.5, **variant), text(7, 17), lengths(17)

    def attempt(seed: int):
        torch.manual_seed(seed)
        return model.hidden(ids, None, call)

    (first, memory), (again, _), (other, _) = attempt(1), attempt(1), attempt(2)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first, other)
    # Embeddings and the last output are dropped: half of each is exactly zero. 5 standard deviations.
    for dropped in (memory.layers[0], first):
        share = float((dropped == 0).double().mean())
        assert abs(share - 0.5) < 5 * 0.5 / dropped.numel() ** 0.5
    kept = memory.layers[0] != 0
    torch.testing.assert_close(memory.layers[0][kept], 2 * inputs_of(model, ids).detach()[kept])
    model.eval()
    torch.testing.assert_close(attempt(1)[0], attempt(2)[0], rtol=0, atol=0)


@each_variant
def test_tied_weights_share_storage_and_gradients(variant: dict) -> None:
    model = small_model(train=True, **variant)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(model.embedding.tables, model.softmax.tables, strict=True))
    apart: dict[str, Any] = variant | {"tie_weight": False}
    untied = small_model(train=True, **apart)
    assert all(
        a.data_ptr() != b.data_ptr() for a, b in zip(untied.embedding.tables, untied.softmax.tables, strict=True)
    )
    extra = sum(x.numel() for x in untied.parameters()) - sum(x.numel() for x in model.parameters())
    assert extra == sum(x.numel() for x in model.softmax.tables)
    values = model.state_dict()
    untied.load_state_dict(values)
    ids, targets = text(2, 7), text(2, 7, seed=1)
    for each in (model, untied):
        Objective(each)(ids, targets, None, lengths(3))[0].backward()
    ends = zip(model.embedding.tables, untied.embedding.tables, untied.softmax.tables, strict=True)
    for both, first, last in ends:
        assert first.grad is not None and last.grad is not None
        torch.testing.assert_close(both.grad, first.grad + last.grad)


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_a_functional_call_does_not_change_tied_parameters(end: str) -> None:
    model, ids = small_model(**VARIANTS["bands"]), text(2, 5)
    before = dict(model.named_parameters(remove_duplicate=False))
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with nullcontext() if end == "returns" else pytest.raises(ValueError, match="at most 22, got"):
        targets = ids if end == "returns" else ids + VOCAB
        torch.func.functional_call(model, values, (ids, targets, None, lengths(3)))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys() and all(after[name] is parameter for name, parameter in before.items())


@pytest.mark.parametrize("untie_r", [False, True])
def test_initial_values_have_the_original_distributions(untie_r: bool) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 1009,
        "cutoffs": (101, 307),
        "div_val": 2,
        "d_embed": 128,
        "n_head": 13,
        "d_head": 17,
    }
    model = small_model(
        **sizes, n_layer=4, d_model=134, d_inner=211, untie_r=untie_r, init_std=0.05, proj_init_std=0.007
    )
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    groups = {
        "norm weight": (1.0, 0.05, [module.weight for module in norms]),
        "norm bias": (0.0, 0.0, [module.bias for module in norms]),
        "linear bias": (0.0, 0.0, [m.bias for m in model.modules() if isinstance(m, nn.Linear) and m.bias is not None]),
        "softmax bias": (0.0, 0.0, [model.softmax.bias, model.softmax.cluster_bias]),
        "attention biases": (0.0, 0.05, [model.backbone.content_bias, model.backbone.position_bias]),
        "clusters": (0.0, 0.05, [model.softmax.cluster_weight]),
        "tables": (0.0, 0.05, list(model.embedding.tables)),
        "projections": (0.0, 0.007, [*model.embedding.projections, *model.softmax.projections]),
        "linear weights": (0.0, 0.05, [m.weight for m in model.modules() if isinstance(m, nn.Linear)]),
    }
    seen = set()
    for name, (mean, deviation, tensors) in groups.items():
        values = torch.cat([torch.as_tensor(x).detach().flatten() for x in tensors])
        assert abs(float(values.mean()) - mean) <= 5 * deviation / len(values) ** 0.5, name
        assert abs(float(values.std()) - deviation) <= 5 * deviation / (2 * len(values)) ** 0.5, name
        if deviation:
            z = (values - mean).abs() / deviation
            assert 0.62 < float((z < 1).double().mean()) < 0.74, f"{name} is not normal"
        seen |= {id(x) for x in tensors}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in seen]
    assert missing == []


def test_a_seed_determines_the_initial_weights() -> None:
    first, second = (small_model().state_dict() for _ in range(2))
    torch.testing.assert_close(dict(first), dict(second), rtol=0, atol=0)


WRONG = """
import torch
from small_models import lengths, small_model, text
from transformer_xl.evaluation.sliding import Sliding
from transformer_xl.evaluation.score import Tempered

model, other, ids, call = small_model(), small_model(n_layer=2), text(2, 5), lengths(3)
lstm = small_model(kind="lstm", n_head=10, d_head=50, init_std=0.02)
memory = model(ids, ids, None, call)[1]
state = lstm(ids, ids, None, call)[1]
with torch.no_grad():
    cache = model.empty_cache(2, call)
sliding, tempered, bands = Sliding(model, 4), Tempered(model, 1.5), small_model(cutoffs=(5, 11), div_val=2)
AUXILIARY = {"kind": "al-rfou", "positions": 9, "multiple_targets": True}
every = [model, bands, lstm, sliding, tempered, small_model(**AUXILIARY)]
wrong = [(f"{name} {type(m).__name__}", m, given) for m in every for name, given in {
    "row of ids": (ids[0], ids[0], None),
    "ids of floats": (ids.double(), ids, None),
    "ids above": (ids + 23, ids, None),
    "ids below": (ids - 23, ids, None),
    "targets of another shape": (ids, ids[:, 1:], None),
    "targets of floats": (ids, ids.double(), None),
    "targets above": (ids, ids + 23, None),
}.items() if not (m is tempered and name == "targets above")]
wrong += [
    ("memory of other rows", model, (ids[:1], ids[:1], memory)),
    ("memory of another depth", other, (ids, ids, memory)),
    ("memory of another width", model, (ids, ids, type(memory)(tuple(x[..., 1:] for x in memory.layers)))),
    ("memory in another dtype", model, (ids, ids, memory.to(torch.float32))),
    ("memory on another device", model, (ids, ids, memory.to("meta"))),
    ("memory without layers", model, (ids, ids, type(memory)(()))),
    ("memory of another kind", model, (ids, ids, sliding.empty_memory(2, lengths(3)))),
    ("windows of another kind", sliding, (ids, ids, memory)),
    ("windows of other rows", sliding, (ids, ids, sliding.empty_memory(3, lengths(3)))),
    ("states of attention", lstm, (ids, ids, memory)),
    ("states of other rows", lstm, (ids[:1], ids[:1], state)),
    ("cache of other rows", model, (ids[:1], ids[:1], cache)),
    ("cache of another depth", other, (ids, ids, cache)),
]
for name, asked, (given, targets, past) in wrong:
    calls = {"call": lambda: asked(given, targets, past, call)}
    if not name.startswith("targets") and asked is not tempered:
        calls |= {
            "hidden": lambda: asked.hidden(given, past, call),
            "log_probs": lambda: asked.log_probs(given, past, call),
        }
    for kind, do in calls.items():
        try:
            with torch.no_grad():
                do()
            print(name, kind, "| nothing was raised")
        except Exception as error:
            print(name, kind, "|", type(error).__name__, error)
"""


def test_invalid_arguments_raise_one_sentence() -> None:
    # A separate process, without the tests' check of shapes.
    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])
    shown = subprocess.run(
        [sys.executable, "-c", WRONG], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert len(lines) > 100
    for line in lines:
        what = line.split()[0].replace("row", "ids").replace("windows", "memory").replace("states", "memory")
        what = what.replace("cache", "memory")
        assert f"| Mistake {what} must " in line and line.endswith(".") and "\n" not in line, line


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int32, torch.uint32])
@pytest.mark.parametrize(
    "kind",
    [{}, VARIANTS["bands"], {"kind": "al-rfou", "positions": 9, "multiple_targets": True}, {"dropout_words": 0.1}],
)
def test_ids_and_targets_of_any_integer_dtype_are_the_same(kind: dict, dtype: torch.dtype) -> None:
    model, ids, call = small_model(**kind), text(2, 5), lengths(3)
    small = ids.to(dtype)
    expected = model(ids, ids, None, call)[0]
    assert torch.equal(model(small, small, None, call)[0], expected)
    assert torch.equal(Objective(model)(small, small, None, call)[0], Objective(model)(ids, ids, None, call)[0])
    assert torch.equal(model.log_probs(small, None, call)[0], model.log_probs(ids, None, call)[0])
    both = [Objective(model, alpha=1.0, beta=1.0)(x, x, None, call)[0] for x in (ids, small)]
    assert torch.equal(*both)
    for reader in (Sliding(model, 4), Tempered(model, 1.5)):
        assert torch.equal(reader(small, small, None, call)[0], reader(ids, ids, None, call)[0])


def test_the_model_reads_the_ids_of_a_vocabulary() -> None:
    vocab = Vocab.build("byte", [])
    ids = torch.from_numpy(vocab.encode("text"))[None]
    log_probs, _ = small_model(vocab_size=len(vocab)).log_probs(ids, None, lengths(3))
    assert ids.dtype == torch.uint8 and log_probs.shape == (1, 4, 256)
