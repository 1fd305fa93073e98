"""The model's parts, its losses and its initial weights; `test_oracle` compares its numbers."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from small_models import BASELINES, VARIANTS, VOCAB, inputs_of, lengths, small_model, text
from torch import nn
from torch.nn.utils import prune

from transformer_xl.evaluation.generate import Sampling, stream
from transformer_xl.evaluation.sliding import Sliding
from transformer_xl.model.attention import sinusoids
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.runtime.device import autocast
from transformer_xl.train.objective import Objective

each_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinusoids_are_rounded_once(dtype: torch.dtype) -> None:
    # bfloat16 has no odd integers beyond 256, so distances must be exact before their sine is rounded.
    exact = sinusoids(3001, 6, dtype=torch.float64)
    torch.testing.assert_close(
        sinusoids(3001, 6, dtype=dtype), exact.to(dtype), rtol=0, atol=2 * torch.finfo(dtype).eps
    )


@each_variant
def test_the_objective_is_the_mean_of_what_is_scored(variant: dict) -> None:
    model, ids, targets = small_model(**variant), text(3, 7), text(3, 7, seed=1)
    targets[1, 2:5] = targets[2, 6] = -1
    nll, memory = model(ids, targets, None, lengths(5))
    log_probs, _ = model.log_probs(ids, None, lengths(5))
    assert log_probs.shape == (3, 7, VOCAB)
    for last in (1, 3, 7):
        some, after = model.log_probs(ids, None, lengths(5), last)
        torch.testing.assert_close((some, after.layers), (log_probs[:, -last:], memory.layers))
    expected = -log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)
    torch.testing.assert_close(nll, expected, check_dtype=False)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in memory.layers), "a view would keep the whole segment"
    mean, losses, after = Objective(model)(ids, targets, None, lengths(5))
    torch.testing.assert_close(losses, nll)
    torch.testing.assert_close(mean, nll[targets >= 0].mean())
    torch.testing.assert_close(after.layers, memory.layers)


@pytest.mark.parametrize("variant", [*VARIANTS.values(), *BASELINES.values()], ids=[*VARIANTS, *BASELINES])
@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_has_a_gradient_for_any_tokens(variant: dict, tied: bool) -> None:
    changes: dict[str, Any] = {} if tied else {"tie_weight": False, "tie_projs": ()}
    for words in ([0, 1, 2], [22, 21, 20]):
        model = small_model(train=True, **variant | changes)
        ids = torch.tensor([words])
        Objective(model)(ids, ids, None, lengths(5))[0].backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.unchecked
@pytest.mark.parametrize("backend", ["strided", "chunked"])
def test_defaults_of_the_process_change_no_number(backend: str) -> None:
    changes: dict[str, Any] = {"dropout": 0.3, "dropatt": 0.3, "dropout_words": 0.3}
    model, call, ids = small_model(train=True, dtype=torch.float32, **changes), lengths(5), text(2, 7)
    for layer in model.backbone.layers:
        layer.attention.backend = backend

    def results() -> list[Any]:
        torch.manual_seed(2)
        nll, memory = model(ids, ids, None, call)
        written = stream(model, [ids[0].numpy(), ids[1, :3].numpy()], call, Sampling(seed=3), 5)
        return [nll, *memory.reset([True, False]).layers, list(written)]

    expected = results()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = results()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


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


@pytest.mark.parametrize("untie_r", [False, True])
def test_initial_values_have_the_original_distributions(untie_r: bool) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 1009,
        "cutoffs": (101, 307),
        "div_val": 2,
        "d_embed": 128,
        "n_head": 13,
        "d_head": 17,
        "gate": "gru",
        "gate_bias": 1.5,
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
        "gate biases": (1.5, 0.0, [p for name, p in model.named_parameters() if name.endswith("gate_bias")]),
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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
@pytest.mark.parametrize("kind", [{}, VARIANTS["bands"]])
def test_ids_and_targets_of_any_integer_dtype_are_the_same(kind: dict, dtype: torch.dtype) -> None:
    model, ids, call = small_model(**kind), text(2, 5), lengths(3)
    small = ids.to(dtype)
    expected = model(ids, ids, None, call)[0]
    assert torch.equal(model(small, small, None, call)[0], expected)
    assert torch.equal(Objective(model)(small, small, None, call)[0], Objective(model)(ids, ids, None, call)[0])
    assert torch.equal(model.log_probs(small, None, call)[0], model.log_probs(ids, None, call)[0])
    both = [Objective(model, alpha=1.0, beta=1.0)(x, x, None, call)[0] for x in (ids, small)]
    assert torch.equal(*both)
    sliding = Sliding(model, 4)
    assert torch.equal(sliding(small, small, None, call)[0], sliding(ids, ids, None, call)[0])
    model.softmax.temperature = 1.5
    assert torch.equal(model(small, small, None, call)[0], model(ids, ids, None, call)[0])


@pytest.mark.parametrize("variant", [VARIANTS[name] for name in ("pre-norm", "n-grams", "gated")])
def test_a_model_on_meta_has_shapes(variant: dict) -> None:
    """For counting. Bands choose rows by their data, which are not there."""
    model, ids = small_model(train=True, dtype=torch.float32, **variant).to("meta"), text(2, 5).to("meta")
    for memory in (None, model(ids, ids, None, lengths(7))[1]):
        nll, _ = model(ids, ids, memory, lengths(7))
        nll.mean().backward()
        assert nll.shape == (2, 5)


def _drawn_after_meta(model: TransformerXL) -> TransformerXL:
    made = deepcopy(model).to("meta").to_empty(device="cpu")
    made.init_weights()
    return made


def _assigned(model: TransformerXL, assign: bool = True) -> TransformerXL:
    """Of a weight with several names, that of the last one remains."""
    with torch.device("meta" if assign else "cpu"):
        made = small_model(**vars(model.config))
    given = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in (name for names in model._tied() for name in names[:-1]):
        given[name].zero_()
    made.load_state_dict(given, assign=assign)
    torch.testing.assert_close(made.state_dict(), model.state_dict(), rtol=0, atol=0)
    return made


def _assigned_once(model: TransformerXL) -> TransformerXL:
    """As from a safetensors file, which has no weight twice; in a larger module."""
    with torch.device("meta"):
        made = small_model(**vars(model.config))
    twice = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    given = {f"0.{name}": tensor.clone() for name, tensor in model.state_dict().items() if name not in twice}
    left = nn.Sequential(made).load_state_dict(given, strict=False, assign=True)
    assert set(left.missing_keys) == {f"0.{name}" for name in twice} and not left.unexpected_keys
    return made


def _untied(model: TransformerXL) -> TransformerXL:
    made = deepcopy(model)
    made.softmax.tables[-1] = nn.Parameter(1.5 * made.softmax.tables[-1].detach())
    return made


@pytest.mark.parametrize(
    "change, more",
    [(_drawn_after_meta, 0), (_assigned, 0), (partial(_assigned, assign=False), 0), (_assigned_once, 0), (_untied, 1)],
)
@pytest.mark.parametrize("variant", [{}, VARIANTS["bands"], VARIANTS["projected"]])
def test_losses_are_those_of_the_log_probabilities_whoever_replaces_weights(variant: dict, change, more: int) -> None:
    """PyTorch makes a weight for each name, so tied tables would come apart."""
    first, ids = small_model(**variant), text(2, 7)
    model = change(first)
    model(ids, ids, None, lengths(3))[0].mean().backward()
    with torch.no_grad():
        for weight in model.parameters():
            assert weight.grad is not None
            weight -= weight.grad
        nll, log_probs = model(ids, ids, None, lengths(3))[0], model.log_probs(ids, None, lengths(3))[0]
    torch.testing.assert_close(nll, -log_probs.gather(-1, ids[..., None])[..., 0])
    assert len(list(model.parameters())) == len(list(first.parameters())) + more


def test_a_feed_forward_without_a_norm_may_take_a_layers_part() -> None:
    model, ids = small_model(), text(2, 5)
    for layer in model.backbone.layers:
        layer.feed_forward = nn.Sequential(nn.Linear(14, 14), nn.ReLU()).double()
    with torch.no_grad():
        nll, log_probs = model(ids, ids, None, lengths(3))[0], model.log_probs(ids, None, lengths(3))[0]
    torch.testing.assert_close(nll, -log_probs.gather(-1, ids[..., None])[..., 0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_pruned_model_in_training_has_a_copy_for_inference(precision: str) -> None:
    model, ids = small_model(train=True, dtype=torch.float32), text(2, 5)
    prune.l1_unstructured(model.backbone.layers[0].attention.qkv, "weight", 0.5)
    expected = model(ids, ids, None, lengths(3))[0]
    with torch.no_grad(), autocast(precision, torch.device("cpu")):
        found = model.for_inference(precision)(ids, ids, None, lengths(3))[0]
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5 if precision == "fp32" else 0.1)
    expected.mean().backward()
