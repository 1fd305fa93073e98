"""Relative attention in both directions, as a module, with the weights of Conformers and of XLNet.

Without the causal mask a position sees later ones too, at negative distances. The Conformer of speech recognition
(Gulati et al. 2020, arXiv 2005.08100, section 2.1) and XLNet (Yang et al. 2019, arXiv 1906.08237) have this attention.

    attention = BidirectionalAttention.from_conformer(layer.self_attn.state_dict())
    y = attention(x, end=frames)                # frames of each row before its padding
    y = attention(x, past, look_ahead=8)        # a stream
    y = attention.in_chunks(x, 16, before=4)    # each frame sees its chunk of 16 and 4 chunks before it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..mistake import Mistake
from ..ops import check_backend, check_masks, relative_attention
from ..ops.masks import Bounds, Mask, visible, without_padding
from .attention import sines_then_cosines
from .modules import Keys, Queries

Encode = Callable[[Float[Tensor, " R"], int], Float[Tensor, "R D"]]
"""Encodings of distances at a width."""
Shift = Literal["relative", "none", "legacy"]
"""What the position term of a score encodes. "relative": the distance between query and key. "none": the position of
the key, without the shift of the paper's Appendix B (WeNet). "legacy": what the first version of ESPnet's shift selects
(`legacy_rel_pos`): for the key after the query 0, for later keys a product of the next query."""
LEGACY_LENGTH = 5000
"""ESPnet's first version encodes the distance d of T frames as d + max(T, this) - T."""
_CONFORMER = {"q_proj": "linear_q", "k_proj": "linear_k", "v_proj": "linear_v", "o_proj": "linear_out"}
_CONFORMER |= {"relative_k_proj": "linear_pos", "bias_u": "pos_bias_u", "bias_v": "pos_bias_v"}
"""The names of Parakeet's and Nemotron's weights, and those of other Conformers."""


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
        shift: Shift = "relative",
        backend: str = "auto",
    ):
        super().__init__()
        if shift not in ("relative", "none", "legacy"):
            raise Mistake(f"shift must be relative, none or legacy, got {shift!r}.")
        if shift != "relative" and backend != "auto":
            raise Mistake(f"backend must be auto with shift = {shift}, which has one way to compute, got {backend!r}.")
        if d_model % 2 and encode in (sines_then_cosines, interleaved_sinusoids):
            raise Mistake(f"d_model must be even, because half of an encoding is sines, got {d_model}.")
        self.shift: Shift = shift
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
        first: Bounds = None,
        start: int | Int[Tensor, " B"] = 0,
    ) -> Float[Tensor, "B T D"]:
        """Attend from `x` to `past` and `x`. For the other arguments see `relative_attention`.

        Args:
            past: earlier vectors, which are only keys and values.
            start: the position of the first vector of `x` in its utterance; only for the shift "none".
        """
        if self.shift != "none" and not (isinstance(start, int) and start == 0):
            raise Mistake(f"start must be left out with shift = {self.shift}.")
        if not x.shape[1]:
            return x
        rows = x if past is None else torch.cat([past, x], dim=1)
        k, v = self.key_value(rows).unflatten(-1, (2, self.n_head, -1)).unbind(2)
        q, k, v = self._heads(self.query(x)), k.transpose(1, 2), v.transpose(1, 2)
        span = k.shape[2] + q.shape[2] - 1
        if self.shift == "relative":
            attended = relative_attention(
                *(q, k, v, self._encoded(k.shape[2] - 1 - torch.arange(span, device=x.device), x)),
                *(self.content_bias, self.position_bias),
                causal=False,
                attn_len=attn_len,
                look_ahead=look_ahead,
                valid=valid,
                end=end,
                first=first,
                dropout_p=self.dropatt if self.training else 0.0,
                backend=self.backend,
            )
        else:
            check_masks(q, valid, end, first, attn_len=attn_len, look_ahead=look_ahead, causal=False)
            memory, ahead = k.shape[2] - q.shape[2], q.shape[2] - 1 if look_ahead is None else look_ahead
            mask = Mask.of(memory, attn_len, valid, ahead=ahead, end=end, first=first)
            scores = self._keyed(q, k, x, start) if self.shift == "none" else self._legacy(q, k, x)
            seen = visible(q.shape[2], k.shape[2], mask, device=x.device)
            scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
            probability = F.dropout(scores.softmax(-1), self.dropatt, self.training)
            attended = without_padding((probability @ v).transpose(0, 1), memory, mask).transpose(0, 1)
        y = self.output(attended.transpose(1, 2).flatten(2))
        return y if self.norm is None else self.norm(x + y)

    def in_chunks(
        self, x: Float[Tensor, "B T D"], size: int, before: int, *, end: Int[Tensor, " B"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Each frame sees its chunk of `size` frames and the `before` chunks before it.

        Chunks become rows, so the work and the memory grow with T, not with its square. A stream that reads chunk by
        chunk, with the last `before` chunks as `past`, has the same result. `end` as in `forward`.
        """
        if self.shift == "legacy" or size < 1 or before < 0:
            got = f"size = {size}, before = {before}, shift = {self.shift}"
            raise Mistake(f"in_chunks must have size >= 1, before >= 0 and another shift than legacy, got {got}.")
        if end is not None and end.shape != x.shape[:1]:
            raise Mistake(f"end must be a number for each of {len(x)} rows, got {list(end.shape)}.")
        if not x.shape[1]:
            return x
        (rows, length, width), count = x.shape, -(-x.shape[1] // size)
        window = (before + 1) * size
        padded = F.pad(x, (0, 0, before * size, count * size - length))
        # Row b * count + c is chunk c of row b, after the `before` chunks that precede it (zeros at the start).
        parts = padded.unfold(1, window, size).transpose(2, 3).reshape(rows * count, window, width)
        start = torch.arange(count, device=x.device) * size
        own = (start.new_full((rows, 1), length) if end is None else end[:, None]) - start
        y = self(
            parts[:, before * size :],
            parts[:, : before * size],
            valid=start.clamp(max=before * size).repeat(rows),
            end=own.clamp(0, size).flatten(),
            start=start.repeat(rows) if self.shift == "none" else 0,
        )
        return y.reshape(rows, count * size, width)[:, :length]

    def _keyed(
        self, q: Queries, k: Keys, x: Float[Tensor, "B T D"], start: int | Int[Tensor, " B"]
    ) -> Float[Tensor, "B H T S"]:
        """Scores with a term of the encoded position of each key."""
        first = torch.as_tensor(start, device=x.device).reshape(-1, 1) - (k.shape[2] - q.shape[2])
        p = self._encoded(first + torch.arange(k.shape[2], device=x.device), x)
        return self._product(q, self.content_bias, k) + self._product(q, self.position_bias, p)

    def _legacy(self, q: Queries, k: Keys, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        """Scores of ESPnet's first version: the paper's shift of T columns, and what wraps is not hidden."""
        if k.shape[2] != q.shape[2]:
            raise Mistake(f"past must be None with shift = legacy, got {k.shape[2] - q.shape[2]} positions.")
        length = q.shape[2]
        p = self._encoded(max(length, LEGACY_LENGTH) - 1 - torch.arange(length, device=x.device), x)
        product = F.pad(self._product(q, self.position_bias, p), (1, 0))
        shifted = product.flatten(2)[:, :, length:].unflatten(2, (length, length))
        return self._product(q, self.content_bias, k) + shifted

    def _product(
        self, q: Queries, bias: Float[Tensor, "H K"], k: Float[Tensor, "*B H S K"]
    ) -> Float[Tensor, "B H T S"]:
        return (q + bias[:, None]) @ k.mT / q.shape[-1] ** 0.5

    def _encoded(self, positions: Int[Tensor, "*B R"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "*B H R K"]:
        """The projected encodings of distances or positions, which half precision cannot represent."""
        exact = torch.promote_types(self.content_bias.dtype, torch.float32)
        encodings = self.encode(positions.flatten().to(exact), x.shape[2]).to(x.dtype)
        return self._heads(self.position(encodings.view(*positions.shape, x.shape[2])))

    def _heads(self, x: Float[Tensor, "*B L W"]) -> Float[Tensor, "*B H L K"]:
        return x.unflatten(-1, (self.n_head, -1)).transpose(-2, -3)

    @classmethod
    def from_conformer(
        cls, weights: Mapping[str, Tensor], *, shift: Shift = "relative", dropatt: float = 0.0
    ) -> BidirectionalAttention:
        """The module with the `state_dict()` of a Conformer's attention. Modules of the same names of weights have
        three arithmetics, so `shift` must say which:

            relative   `Wav2Vec2ConformerSelfAttention`, `ParakeetEncoderAttention` and those like it in transformers;
                       `RelPositionMultiHeadedAttention` of ESPnet (`rel_pos`), NeMo's
            none       `RelPositionMultiHeadedAttention` of WeNet
            legacy     `LegacyRelPositionMultiHeadedAttention` of ESPnet (`legacy_rel_pos`)
        """
        weights = {_renamed(name): weight for name, weight in weights.items()}
        bias = "linear_q.bias" in weights
        found = {"content_bias": weights["pos_bias_u"], "position_bias": weights["pos_bias_v"]}
        found["position.weight"] = weights["linear_pos.weight"]
        for kind in ("weight", "bias") if bias else ("weight",):
            found |= {f"query.{kind}": weights[f"linear_q.{kind}"], f"output.{kind}": weights[f"linear_out.{kind}"]}
            found[f"key_value.{kind}"] = torch.cat([weights[f"linear_{name}.{kind}"] for name in "kv"])
        n_head, d_head = weights["pos_bias_u"].shape
        width = weights["linear_q.weight"].shape[1]
        module = cls(width, n_head, d_head, bias=bias, dropatt=dropatt, encode=interleaved_sinusoids, shift=shift)
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


def _renamed(name: str) -> str:
    """A Conformer's name of a weight, also from one of Parakeet's."""
    module, dot, kind = name.partition(".")
    return _CONFORMER.get(module, module) + dot + kind
