"""Gates near the identity at the start, in every model. `test_oracle` compares their equations and derivatives."""

from __future__ import annotations

import pytest
from small_models import lengths, small_backbone, vectors

GATES = ["input", "output", "highway", "sigmoid-tanh", "gru"]


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate != "input"])
def test_a_new_gated_model_is_the_nearer_to_the_identity_the_greater_its_bias(gate: str) -> None:
    x, distances = vectors(2, 7), []
    for bias in (0.0, 2.0, 4.0, 30.0):
        backbone = small_backbone(gate=gate, gate_bias=bias, relu_output=True, pre_lnorm=True)
        distances.append(float((backbone(x, None, lengths(3))[0][-1] - x).detach().abs().max()))
    assert distances == sorted(distances, reverse=True) and distances[0] > 1e-3
    assert distances[-1] < 1e-10  # sigmoid(-30) is 1e-13; here it multiplies numbers of about 1
