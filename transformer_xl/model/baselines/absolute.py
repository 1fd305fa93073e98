"""Transformers with positions in a segment instead of distances: the paper's vanilla models.

    Vaswani et al. 2017    adds a sinusoid of the position to each embedded token
    Al-Rfou et al. 2019    adds a learned vector of the position to the input of each layer; each layer has a table

Positions count from 0 in each segment (after a row's padding). Memory keeps the positions of its own segment, so tokens
of different segments share positions. This incoherence is the paper's argument for relative positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...config.settings import Lengths, TransformerXLConfig
from ...mistake import Mistake
from ..adaptive import AdaptiveSoftmax
from ..attention import Positions, content_attention, sinusoids
from ..inference import check_state
from ..transformer_xl import DecoderLayer, Prediction, State, TransformerXL, TransformerXLBackbone, draw_weight


class ContentLayer(DecoderLayer):
    """A layer that attends by content alone."""

    project_position: ClassVar[bool] = False

    def attend(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B H S K"],
        v: Float[Tensor, "B H S K"],
        positions: Positions | None,
        attn_len: int | None,
        valid: Int[Tensor, " B"] | None,
    ) -> Float[Tensor, "B H T K"]:
        dropout_p = self.attention.dropatt if self.training else 0.0
        return content_attention(q, k, v, attn_len=attn_len, valid=valid, dropout_p=dropout_p)


class Vaswani(TransformerXLBackbone):
    """Adds sinusoids to the embeddings; the layers attend by content alone."""

    layer_class: ClassVar[type[DecoderLayer]] = ContentLayer

    def forward(
        self, x: Float[Tensor, "B T D"], memory: State | None, lengths: Lengths
    ) -> tuple[list[Float[Tensor, "B T D"]], State]:
        _check(self.config, x.shape[1], lengths)
        table = sinusoids(x.shape[1], x.shape[2], device=x.device, dtype=x.dtype).flip(0)
        return super().forward(_add_positions(table, x, None if memory is None else memory.valid), memory, lengths)

    def positions(self, length: int, clamp_len: int | None, like: Tensor) -> Iterable[None]:
        """No positions, because content attention takes none."""
        return [None] * len(self.layers)


class AlRfou(Vaswani):
    """Adds learned positions to the input of every layer. Memory holds these sums."""

    def __init__(self, config: TransformerXLConfig, *, draw: bool = True, **options: Any):
        super().__init__(config, draw=draw, **options)
        self.places: nn.Parameter = nn.Parameter(torch.empty(config.n_layer, config.positions, config.d_model))
        if draw:
            self.init_weight("places", self.places)

    def forward(
        self, x: Float[Tensor, "B T D"], memory: State | None, lengths: Lengths
    ) -> tuple[list[Float[Tensor, "B T D"]], State]:
        """The output of every layer, each after `final_norm`, and the memory for the next segment."""
        _check(self.config, x.shape[1], lengths)
        state: Any = self.empty_memory(len(x), lengths) if memory is None else memory
        check_state(state, [self.config.d_model] * len(self.layers), x)
        state = state.grow_to(lengths.mem_len, zero_filled=self.config.zero_memory)
        x = self.dropout(x)
        recompute = self.recompute and torch.is_grad_enabled()
        inputs, outputs = [], []
        for layer, past, table in zip(self.layers, state.context(x.shape[1], lengths).pasts, self.places, strict=True):
            inputs.append(_add_positions(table, x, state.valid))
            read = partial(checkpoint, layer, use_reentrant=False) if recompute else layer
            x = read(inputs[-1], past, None, attn_len=lengths.attn_len, valid=state.valid)
            outputs.append(x if self.final_norm is None else self.final_norm(x))
        return outputs, self.remember(state, inputs, lengths)


class Auxiliary(TransformerXL):
    """A language model with the auxiliary losses of Al-Rfou et al. 2019."""

    def __init__(self, config: TransformerXLConfig, **options: Any):
        super().__init__(config, **options)
        self.second_softmax: AdaptiveSoftmax | None = None
        if config.multiple_targets:
            sizes = (config.vocab_size, config.embed_width, config.d_model)
            self.second_softmax = AdaptiveSoftmax(*sizes, cutoffs=config.cutoffs, div_val=config.div_val)
            for name, weight in self.second_softmax.named_parameters(prefix="second_softmax"):
                draw_weight(self, name, weight)

    def training_nll(
        self, prediction: Prediction, targets: Int[Tensor, "B T"], progress: float
    ) -> Float[Tensor, "B T"]:
        """Nats of each target, plus the weighted nats of the auxiliary predictions:

        intermediate_losses    layer l of n also predicts the target, until l / 2n of training
        multiple_targets       a second softmax predicts the token after the target, with half the weight, at every
                               layer that predicts the target; both tokens must be targets of the segment
        """
        predicting = [prediction.features]
        if self.config.intermediate_losses:
            layers = enumerate(prediction.outputs[:-1], start=1)
            predicting += [self.dropout(x) for n, x in layers if progress < n / (2 * self.config.n_layer)]
        softmax, second = self.softmax, self.second_softmax
        total: Any = prediction.nll + sum(softmax.nll(x, targets, prediction.tables) for x in predicting[1:])
        if second is not None:
            later = F.pad(targets[:, 1:], (0, 1), value=-1).where(targets >= 0, -1)
            total = total + 0.5 * sum(second.nll(x, later, None) for x in predicting)
        return total


def _check(config: TransformerXLConfig, tokens: int, lengths: Lengths) -> None:
    """Refuse a call that absolute positions cannot serve."""
    if lengths.clamp_len is not None:
        raise Mistake(
            f"clamp_len must be none for kind = {config.kind}, which uses no distances, got {lengths.clamp_len}. "
            "Leave it out."
        )
    if tokens > (config.positions or tokens):
        raise Mistake(
            f"tgt_len must be at most model.positions = {config.positions}, got a segment of {tokens} tokens. Lower it."
        )


def _add_positions(
    table: Float[Tensor, "N D"], x: Float[Tensor, "B T D"], valid: Int[Tensor, " B"] | None
) -> Float[Tensor, "B T D"]:
    """Add the table's row of each token's position; positions count from a row's first token after its padding."""
    if valid is None:
        return x + table[: x.shape[1]]
    position = torch.arange(x.shape[1], device=x.device) + valid.clamp(max=0)[:, None]
    return x + table[position.clamp(min=0)]
