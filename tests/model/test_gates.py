"""Gates near the identity at the start, in every model. `test_oracle` compares their equations and derivatives."""

from __future__ import annotations

import pytest
import torch
from small_models import lengths, small_backbone, small_model, text, vectors

from transformer_xl.model.gates import Gate

GATES = ["input", "output", "highway", "sigmoid-tanh", "gru"]


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate != "input"])
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


def test_a_copy_in_bf16_has_rounded_matrices_and_exact_biases() -> None:
    model = small_model(dtype=torch.float32, gate="gru", pre_lnorm=True)
    copied, ids = model.for_inference("bf16"), text(2, 9)
    assert {type(layer.feed_forward.join) for layer in copied.backbone.layers} == {Gate}
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
    hidden, memory = model.hidden(ids, None, lengths(5))
    torch.testing.assert_close(hidden, norm(memory.layers[0]))  # with the positions of vaswani
