"""One call of the op, as the backends get it."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from .masks import Mask


class Call(NamedTuple):
    """What `relative_attention` was called with: shapes are checked, and r and the biases have the dtype of q."""

    q: Float[Tensor, "B H T K"]
    k: Float[Tensor, "B H S K"]
    v: Float[Tensor, "B H S K"]
    r: Float[Tensor, "H R K"]
    """The encodings of the distances R - 1 - `mask.ahead`, ..., -`mask.ahead`."""
    content_bias: Float[Tensor, "H K"]
    position_bias: Float[Tensor, "H K"]
    mask: Mask
    dropout_p: float
    scale: float
