"""Gates against the paper's equations, and near the identity at the start. `oracle` checks them in a model."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import layers_of, lengths, small_backbone, small_config, small_model, text, vectors
from torch import Tensor, nn, sigmoid, tanh

from transformer_xl.model.gates import Gate, build_join
from transformer_xl.train.objective import Objective

D = 14


def gru(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (w_r, w_z, w_g), (u_r, u_z) = w["of_y.weight"].split(D), w["of_x.weight"].split(D)
    r = sigmoid(y @ w_r.T + x @ u_r.T)
    z = sigmoid(y @ w_z.T + x @ u_z.T - w["gate_bias"])
    h = tanh(y @ w_g.T + (r * x) @ w["of_reset.weight"].T)
    return (1 - z) * x + z * h


def highway(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    share = sigmoid(x @ w["of_x.weight"].T + w["gate_bias"])
    return share * x + (1 - share) * y


PAPER: dict[str, Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]] = {
    "input": lambda w, x, y: sigmoid(x @ w["of_x.weight"].T) * x + y,
    "output": lambda w, x, y: x + sigmoid(x @ w["of_x.weight"].T - w["gate_bias"]) * y,
    "highway": highway,
    "sigmoid-tanh": lambda w, x, y: (
        x + sigmoid(y @ w["of_y.weight"][:D].T - w["gate_bias"]) * tanh(y @ w["of_y.weight"][D:].T)
    ),
    "gru": gru,
}
"""Section 3.2 of Parisotto et al. 2019 (arXiv 1910.06764)."""
each_gate = pytest.mark.parametrize("gate", PAPER)
BIASED = [gate for gate in PAPER if gate != "input"]


def gate_of(gate: str, **changes: Any) -> Gate:
    """A gate with random weights."""
    join = build_join(small_config(gate=gate, **changes))
    assert isinstance(join, Gate)
    torch.manual_seed(1)
    for weight in join.parameters():
        nn.init.normal_(weight, 0.0, 0.5)
    return join.double()


@each_gate
@pytest.mark.parametrize("relu", [False, True])
def test_outputs_and_gradients_are_those_of_the_papers_equations(gate: str, relu: bool) -> None:
    join = gate_of(gate, relu_output=relu)
    inputs = [vectors(2, 3, seed).requires_grad_() for seed in (1, 2)]
    weights, direction = dict(join.named_parameters()), vectors(2, 3, 3)
    expected = PAPER[gate](weights, inputs[0], inputs[1].relu() if relu else inputs[1])
    found = join(*inputs)
    torch.testing.assert_close(found, expected)
    moved = [*inputs, *weights.values()]
    gradients = [torch.autograd.grad((out * direction).sum(), moved) for out in (found, expected)]
    torch.testing.assert_close(*gradients)


@each_gate
def test_the_number_of_matrices_is_known(gate: str) -> None:
    matrices = sum(weight.numel() for weight in gate_of(gate).parameters() if weight.ndim == 2)
    assert matrices == small_config(gate=gate).gate_matrices * D * D


@pytest.mark.parametrize("gate", BIASED)
def test_a_new_gated_model_is_the_nearer_to_the_identity_the_greater_its_bias(gate: str) -> None:
    x, distances = vectors(2, 7), []
    for bias in (0.0, 2.0, 4.0, 30.0):
        backbone = small_backbone(gate=gate, gate_bias=bias, relu_output=True, pre_lnorm=True)
        distances.append(float((backbone(x, None, lengths(3))[0][-1] - x).detach().abs().max()))
    assert distances == sorted(distances, reverse=True) and distances[0] > 1e-3
    assert distances[-1] < 1e-10  # sigmoid(-30) is 1e-13; here it multiplies numbers of about 1


def test_gates_begin_with_their_bias_and_with_matrices_of_init_std() -> None:
    model = small_model(gate="gru", gate_bias=1.5, d_model=134, init_std=0.05)
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    assert len(gates) == 2 * model.config.n_layer
    for gate in gates:
        for name, weight in gate.named_parameters():
            if name == "gate_bias":
                assert (weight == 1.5).all()
            else:  # five standard deviations of the estimate
                assert abs(float(weight.detach().std()) - 0.05) < 5 * 0.05 / (2 * weight.numel()) ** 0.5


def test_without_a_gate_nothing_is_added() -> None:
    assert build_join(small_config()) is operator.add
    assert not [name for name in small_model().state_dict() if "join" in name]
    assert small_model(relu_output=True).state_dict().keys() == small_model().state_dict().keys()


def test_with_relu_output_a_sublayer_only_raises_the_identity_map() -> None:
    backbone, x = small_backbone(relu_output=True, pre_lnorm=True), vectors(2, 7)
    for before, after in zip([x, *(outputs := backbone(x, None, lengths(3))[0])], outputs, strict=False):
        assert (after >= before).all() and (after > before).any()


def test_every_weight_of_a_gated_model_has_a_gradient() -> None:
    for gate in PAPER:
        model, ids = small_model(train=True, gate=gate), text(2, 5)
        Objective(model)(ids, ids, None, lengths(3))[0].backward()
        assert not [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]


def test_a_copy_in_bf16_has_rounded_matrices_and_exact_biases() -> None:
    model = small_model(dtype=torch.float32, gate="gru", pre_lnorm=True)
    copied, ids = model.for_inference("bf16"), text(2, 9)
    [gate] = {type(layer.feed_forward.join) for layer in layers_of(copied)}
    assert gate is type(model.backbone.layers[0].attention.join)
    for name, weight in copied.named_parameters():
        if "join" in name:
            assert weight.dtype == (torch.float32 if name.endswith("gate_bias") else torch.bfloat16), name
    with torch.no_grad():
        expected, _ = model.log_probs(ids, None, lengths(9))
        with torch.autocast("cpu", torch.bfloat16):
            found, _ = copied.log_probs(ids, None, lengths(9))
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)  # a few roundings of bfloat16, 2^-8


@pytest.mark.parametrize("kind", [{"kind": "shaw", "positions": 5}, {"kind": "vaswani"}])
def test_baselines_with_attention_have_gates_too(kind: dict) -> None:
    model = small_model(gate="output", gate_bias=30.0, pre_lnorm=True, final_norm=True, **kind)
    ids, norm = text(2, 5), model.backbone.final_norm
    x = model.embedding(ids)
    hidden, memory = model.hidden(ids, None, lengths(5))
    first = memory.layers[0]  # with the positions of vaswani
    torch.testing.assert_close(hidden, norm(first))
    assert x.shape == first.shape
