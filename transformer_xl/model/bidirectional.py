"""Relative attention in both directions, as a module, with the weights of Conformers and of XLNet.

Without the causal mask a position sees later ones too, at negative distances. The Conformer of speech recognition
(Gulati et al. 2020, arXiv 2005.08100, section 2.1) and XLNet (Yang et al. 2019, arXiv 1906.08237) have this attention.

    attention = BidirectionalAttention.from_conformer(layer.self_attn.state_dict())
    y = attention(x, end=frames)                # frames of each row before its padding
    y = attention(x, past, look_ahead=8)        # a stream
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..ops import check_backend, relative_attention
from .attention import sines_then_cosines
from .modules import First

Encode = Callable[[Float[Tensor, " R"], int], Float[Tensor, "R D"]]
"""Encodings of distances at a width."""


def interleaved_sinusoids(distance: Float[Tensor, " R"], d_model: int) -> Float[Tensor, "R D"]:
    """The same numbers as `sines_then_cosines`, alternating: sine, cosine, sine, ..."""
    return torch.stack(sines_then_cosines(distance, d_model).chunk(2, dim=-1), dim=-1).flatten(-2)


class BidirectionalAttention(nn.Module):
    """Multi-head attention of a segment over memory and segment, in both directions.

    It contains projections, the paper's biases u and v, and no dropout of its output. With `norm_epsilon` it returns
    `norm(x + y)`, as XLNet does, otherwise y alone.
    """

    def __init__(
        self,
        d_model: int,
        n_head: int,
        d_head: int,
        *,
        bias: bool = True,
        dropatt: float = 0.0,
        norm_epsilon: float | None = None,
        encode: Encode = sines_then_cosines,
        backend: str = "auto",
    ):
        super().__init__()
        self.n_head: int = n_head
        self.dropatt: float = dropatt
        self.encode: Encode = encode
        self.backend: str = check_backend(backend)
        self.query: nn.Linear = nn.Linear(d_model, n_head * d_head, bias)
        self.key_value: nn.Linear = nn.Linear(d_model, 2 * n_head * d_head, bias)
        self.position: nn.Linear = nn.Linear(d_model, n_head * d_head, bias=False)
        self.output: nn.Linear = nn.Linear(n_head * d_head, d_model, bias)
        self.content_bias: nn.Parameter = nn.Parameter(torch.zeros(n_head, d_head))
        self.position_bias: nn.Parameter = nn.Parameter(torch.zeros(n_head, d_head))
        self.norm: nn.LayerNorm | None = None if norm_epsilon is None else nn.LayerNorm(d_model, norm_epsilon)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        past: Float[Tensor, "B M D"] | None = None,
        *,
        attn_len: int | None = None,
        look_ahead: int | None = None,
        valid: Int[Tensor, " B"] | None = None,
        end: Int[Tensor, " B"] | None = None,
        first: First = None,
    ) -> Float[Tensor, "B T D"]:
        """`past`: earlier vectors, which are only keys and values. For the other arguments see `relative_attention`."""
        rows = x if past is None else torch.cat([past, x], dim=1)
        distance = torch.arange(rows.shape[1] - 1, -x.shape[1], -1, device=x.device, dtype=self.content_bias.dtype)
        encodings = self.encode(distance, x.shape[2]).to(x.dtype)
        k, v = self.key_value(rows).chunk(2, dim=-1)
        q, k, v, r = (self._heads(each) for each in (self.query(x), k, v, self.position(encodings)))
        attended = relative_attention(
            *(q, k, v, r, self.content_bias, self.position_bias),
            causal=False,
            attn_len=attn_len,
            look_ahead=look_ahead,
            valid=valid,
            end=end,
            first=first,
            dropout_p=self.dropatt if self.training else 0.0,
            backend=self.backend,
        )
        y = self.output(attended.transpose(1, 2).flatten(2))
        return y if self.norm is None else self.norm(x + y)

    def _heads(self, x: Float[Tensor, "*B L W"]) -> Float[Tensor, "*B H L K"]:
        return x.unflatten(-1, (self.n_head, -1)).transpose(-2, -3)

    @classmethod
    def from_conformer(cls, weights: Mapping[str, Tensor], *, dropatt: float = 0.0) -> BidirectionalAttention:
        """The module with the `state_dict()` of `Wav2Vec2ConformerSelfAttention` (transformers), or of ESPnet's
        `RelPositionMultiHeadedAttention`.

        A query's score of a key has a term of the encoded distance between them. WeNet's modules, and ESPnet's
        `LegacyRelPositionMultiHeadedAttention`, have the same names of weights and another arithmetic, which this class
        does not compute.
        """
        bias = "linear_q.bias" in weights
        found = {"content_bias": weights["pos_bias_u"], "position_bias": weights["pos_bias_v"]}
        found["position.weight"] = weights["linear_pos.weight"]
        for kind in ("weight", "bias") if bias else ("weight",):
            found |= {f"query.{kind}": weights[f"linear_q.{kind}"], f"output.{kind}": weights[f"linear_out.{kind}"]}
            found[f"key_value.{kind}"] = torch.cat([weights[f"linear_{name}.{kind}"] for name in "kv"])
        n_head, d_head = weights["pos_bias_u"].shape
        width = weights["linear_q.weight"].shape[1]
        module = cls(width, n_head, d_head, bias=bias, dropatt=dropatt, encode=interleaved_sinusoids)
        return module._loaded(found)

    @classmethod
    def from_xlnet(
        cls, weights: Mapping[str, Tensor], *, norm_epsilon: float = 1e-12, dropatt: float = 0.0
    ) -> BidirectionalAttention:
        """The module with the `state_dict()` of `XLNetRelativeAttention` (transformers).

        `norm_epsilon` is `layer_norm_eps` of XLNet's configuration. XLNet's term of two text segments is left out.
        """
        query, key, value, position, output = (weights[name].flatten(1) for name in "qkvro")  # each is [D, H * K]
        found = {"query.weight": query.mT, "key_value.weight": torch.cat([key, value], dim=1).mT}
        found |= {"position.weight": position.mT, "output.weight": output}
        found |= {"content_bias": weights["r_w_bias"], "position_bias": weights["r_r_bias"]}
        found |= {f"norm.{kind}": weights[f"layer_norm.{kind}"] for kind in ("weight", "bias")}
        d_model, n_head, d_head = weights["q"].shape
        module = cls(d_model, n_head, d_head, bias=False, dropatt=dropatt, norm_epsilon=norm_epsilon)
        return module._loaded(found)

    def _loaded(self, weights: Mapping[str, Tensor]) -> BidirectionalAttention:
        self.to(weights["output.weight"]).load_state_dict(weights)
        return self
