"""What joins the input x and the output y of a sublayer: their sum, or a gate of GTrXL.

Parisotto et al. 2019, Stabilizing Transformers for Reinforcement Learning (https://arxiv.org/abs/1910.06764), section
3.2. With `config.gate`, σ for the sigmoid and * for the product of elements:

    none            x + y
    input           σ(W x) * x + y
    output          x + σ(W x - b) * y
    highway         σ(W x + b) * x + (1 - σ(W x + b)) * y
    sigmoid-tanh    x + σ(W y - b) * tanh(U y)
    gru             (1 - z) * x + z * tanh(W_g y + U_g (r * x))
                    r = σ(W_r y + U_r x),    z = σ(W_z y + U_z x - b)

The vector b has the initial value `config.gate_bias`. The greater it is, the nearer to x a new model's sublayers are
(except with `input`), so the model first depends on the newest input alone. With `config.relu_output` y goes through a
ReLU before it is joined, as in the paper's identity map reordering (section 3.1), which also has `pre_lnorm`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..config.shape import TransformerXLConfig
from .modules import RowLinear, Vectors


def build_join(config: TransformerXLConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """The function or new module that joins the x and y of a sublayer."""
    if config.gate == "none":
        return add_positive if config.relu_output else operator.add
    return Gate(config)


def add_positive(x: Float[Tensor, "*B D"], y: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
    """x + ReLU(y)."""
    return x + F.relu(y)


class Gate(nn.Module):
    """One of the gates; b is `gate_bias`.

    `of_x` is W; with `gru` it has the rows of U_r and U_z. `of_y` has the rows of W and U with `sigmoid-tanh`, those of
    W_r, W_z and W_g with `gru`. `of_reset` is U_g.
    """

    def __init__(self, config: TransformerXLConfig):
        super().__init__()
        kind, width = config.gate, config.d_model
        self.kind: str = kind
        self.relu: bool = config.relu_output
        if kind in ("sigmoid-tanh", "gru"):
            self.of_y: RowLinear = RowLinear(width, (3 if kind == "gru" else 2) * width, bias=False)
        if kind != "sigmoid-tanh":
            self.of_x: RowLinear = RowLinear(width, (2 if kind == "gru" else 1) * width, bias=False)
        if kind == "gru":
            self.of_reset: RowLinear = RowLinear(width, width, bias=False)
        if kind != "input":
            self.gate_bias: nn.Parameter = nn.Parameter(torch.empty(width))

    def forward(self, x: Vectors, y: Vectors) -> Vectors:
        y = F.relu(y) if self.relu else y
        if self.kind == "input":
            return self.of_x(x).sigmoid() * x + y
        if self.kind == "output":
            return x + (self.of_x(x) - self.gate_bias).sigmoid() * y
        if self.kind == "highway":
            gate = (self.of_x(x) + self.gate_bias).sigmoid()
            return gate * x + (1 - gate) * y
        if self.kind == "sigmoid-tanh":
            gate, bounded = self.of_y(y).chunk(2, dim=-1)
            return x + (gate - self.gate_bias).sigmoid() * bounded.tanh()
        r_y, z_y, new_y = self.of_y(y).chunk(3, dim=-1)
        r_x, z_x = self.of_x(x).chunk(2, dim=-1)
        r, z = (r_y + r_x).sigmoid(), (z_y + z_x - self.gate_bias).sigmoid()
        return (1 - z) * x + z * (new_y + self.of_reset(r * x)).tanh()
