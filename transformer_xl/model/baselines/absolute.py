"""Transformers that know places in a segment, not distances: the paper's vanilla models.

    Vaswani et al. 2017    a sinusoid of its place is added to each embedded token
    Al-Rfou et al. 2019    a learned vector of its place is added to what each layer reads, a table for each layer

Places count from 0 in each segment (behind a row's padding). Such a model can have a memory: what a layer read then
keeps the places that it had in its own segment, so that tokens of all segments share their places, as `mem_len` 0
avoids. That this is incoherent is the paper's argument for relative positions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from ...config.settings import Lengths
from ...mistake import Mistake
from ...ops.masks import visible, without_padding
from ..adaptive import AdaptiveSoftmax
from ..attention import sinusoids
from ..inputs import as_targets
from ..transformer_xl import State, TransformerXL, mean_nll
from .sublayer import Sublayer


class PlainAttention(Sublayer):
    """Causal attention by content alone."""

    def attend(self, q, k, v, positions, content_bias, position_bias, *, attn_len, valid):
        queries, keys = q.shape[2], k.shape[2]
        dropout_p = self.dropatt if self.training else 0.0
        if valid is None and (attn_len is None or attn_len >= keys) and queries in (1, keys):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=queries > 1)
        seen = visible(queries, keys, attn_len=attn_len, valid=valid, device=q.device)
        seen = seen | ~seen.any(-1, keepdim=True)  # padding sees nothing, which not every kernel bears
        out = F.scaled_dot_product_attention(q, k, v, seen, dropout_p)
        return without_padding(out.transpose(0, 1), valid).transpose(0, 1)


class Absolute(TransformerXL):
    """What the two have in common: distances mean nothing to their layers."""

    attention = PlainAttention

    def _add_positional(self) -> None:
        pass

    def _positions(self, length: int, *, clamp_len: int | None, like: Tensor) -> Iterable[Float[Tensor, "H S K"]]:
        nothing = like.new_zeros(1, 1, 1).expand(self.config.n_head, length, self.config.d_head)
        return [nothing] * len(self.layers)

    def _biases(self, clamp_len: int | None):
        return [None] * len(self.layers), [None] * len(self.layers)

    def _check(self, tokens: int, lengths: Lengths) -> None:
        """`ValueError` for a call that places have no answer to."""
        if lengths.clamp_len is not None:
            raise Mistake(
                f"clamp_len must be none for kind = {self.config.kind}, which knows no distances, got "
                f"{lengths.clamp_len}. Leave it out."
            )
        if tokens > (self.config.positions or tokens):
            raise Mistake(
                f"tgt_len must be at most model.positions = {self.config.positions}, got a segment of {tokens} tokens. "
                "Lower it."
            )


def _placed(
    table: Float[Tensor, "N D"], x: Float[Tensor, "B T D"], valid: Int[Tensor, " B"] | None
) -> Float[Tensor, "B T D"]:
    """`x` with each token's place added, which counts from the first one of its row that is no padding."""
    if valid is None:
        return x + table[: x.shape[1]]
    place = torch.arange(x.shape[1], device=x.device) + valid.clamp(max=0)[:, None]
    return x + table[place.clamp(min=0)]


class Vaswani(Absolute):
    """Sinusoids at the bottom."""

    def _enter(self, x: Float[Tensor, "B T D"], valid: Int[Tensor, " B"] | None, lengths: Lengths) -> Tensor:
        self._check(x.shape[1], lengths)
        last = self.config.positions
        table = sinusoids(last or x.shape[1], x.shape[2], device=x.device, dtype=x.dtype)  # the last place comes first
        return super()._enter(_placed(table if last else table.flip(0), x, valid), valid, lengths)


class AlRfou(Absolute):
    """Learned places in every layer, and two losses that help deep models to learn and are never evaluated:

    intermediate_losses    layer l of n predicts the target too, through the same softmax, until l / 2n of training
    multiple_targets       a second softmax predicts the token after the target's, at 0.5 of the weight, wherever a
                           layer predicts the target and both are in the segment and trained on
    """

    def _add_positional(self) -> None:
        config = self.config
        self.places = nn.Parameter(torch.empty(config.n_layer, config.positions, config.d_model))
        self.second_softmax = None
        if config.multiple_targets:
            sizes = (config.vocab_size, config.embed_width, config.d_model)
            self.second_softmax = AdaptiveSoftmax(*sizes, cutoffs=config.cutoffs, div_val=config.div_val)

    def _enter(self, x: Float[Tensor, "B T D"], valid: Int[Tensor, " B"] | None, lengths: Lengths) -> Tensor:
        self._check(x.shape[1], lengths)
        return super()._enter(x, valid, lengths)

    def _enter_layer(self, number: int, x: Float[Tensor, "B T D"], valid: Int[Tensor, " B"] | None) -> Tensor:
        return _placed(self.places[number], x, valid)

    def objective(
        self, ids: Integer[Tensor, "B T"], targets: Integer[Tensor, "B T"], memory: State | None, lengths: Lengths
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B T"], State]:
        """What is trained, the auxiliary losses included, per scored target; also what `forward` returns."""
        if not self.config.intermediate_losses and self.second_softmax is None:
            return super().objective(ids, targets, memory, lengths)
        targets = as_targets(targets, ids.shape)
        x, tables = self.embedding.lookup(ids)
        lower: list[Tensor] = []
        hidden, after = self._read(x, memory, lengths, lower)
        nll = self.softmax.nll(hidden, targets, tables)
        predicting = [hidden]
        if self.config.intermediate_losses:
            layers = enumerate(lower, start=1)
            predicting += [self._features(x) for layer, x in layers if self.progress < layer / (2 * len(self.layers))]
        total = nll + sum(self.softmax.nll(x, targets, tables) for x in predicting[1:])
        if self.second_softmax is not None:
            later = F.pad(targets[:, 1:], (0, 1), value=-1).where(targets >= 0, -1)
            total = total + 0.5 * sum(self.second_softmax.nll(x, later) for x in predicting)
        return mean_nll(total, targets), nll, after
