"""The training objective: the mean nll of the targets, and regularisation of activations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn

from ..config.settings import Lengths
from ..model.memory import Memory
from ..model.modules import as_targets
from ..model.transformer_xl import TransformerXL
from ..runtime.device import on_device


class Counts(NamedTuple):
    """The counts of the whole batch that a step's sums are divided by: neither chunks nor ranks change them."""

    targets: Float[Tensor, ""]
    pairs: Float[Tensor, ""]
    """Pairs of neighbouring positions of a row that are both scored."""

    @classmethod
    def of(cls, scored: Bool[Tensor, "B T"], device: torch.device | None = None) -> Counts:
        """`scored` marks the targets of the whole batch."""
        counts = torch.stack([scored.sum(), (scored[:, 1:] & scored[:, :-1]).sum()]).clamp(min=1)
        counts = counts.to(torch.float32)
        return cls(*(counts if device is None else on_device(counts, device)).unbind())


class Objective(nn.Module):
    """The loss of a model: sums over the rows of a call, divided by the counts of the whole batch.

        loss, nll, memory = objective(ids, targets, memory, lengths)

    The loss is the sum of

        training_nll           of the model, over targets: nats, or more for some kinds (0 where they are -1)
        alpha |h_t|^2          AR of Merity et al. 2017: mean square of the last layer's output, over targets
        beta |h_t - h_t-1|^2   TAR: mean square of its change, over pairs of neighbouring targets

    DDP and torch.compile wrap this module. It uses the model's weights only through the model's calls, because only
    these gather the weights under FSDP2.
    """

    def __init__(self, model: TransformerXL, *, alpha: float = 0.0, beta: float = 0.0):
        super().__init__()
        self.model: TransformerXL = model
        self.alpha: float = alpha
        self.beta: float = beta

    def forward(
        self,
        ids: Integer[Tensor, "B T"],
        targets: Integer[Tensor, "B T"],
        memory: Memory | None,
        lengths: Lengths,
        *,
        counts: Counts | None = None,
        progress: float = 0.0,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B T"], Memory]:
        """The loss, the nats of each target, and the memory for the next segment.

        Args:
            counts: None if these targets are the whole batch.
            progress: the share of training that is done, from 0 to 1.
        """
        targets = as_targets(targets, ids.shape)
        scored = targets >= 0
        counts = Counts.of(scored) if counts is None else counts
        prediction, memory = self.model.predict(ids, targets, memory, lengths)
        loss = self.model.training_nll(prediction, targets, progress).sum() / counts.targets
        if self.alpha or self.beta:
            output, pairs = prediction.outputs[-1], scored[:, 1:] & scored[:, :-1]
            change = output[:, 1:] - output[:, :-1]
            squares = (_square(output, scored) / counts.targets, _square(change, pairs) / counts.pairs)
            loss = loss + (self.alpha * squares[0] + self.beta * squares[1])
        return loss, prediction.nll, memory


def _square(x: Float[Tensor, "B L D"], counted: Bool[Tensor, "B L"]) -> Float[Tensor, ""]:
    """The sum over positions of the mean square over features."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return (exact.square().mean(-1) * counted).sum()
