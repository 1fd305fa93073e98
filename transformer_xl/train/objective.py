"""The training objective: the mean nll of the targets, regularisation of activations, auxiliary losses."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from ..model.inputs import as_targets
from ..model.transformer_xl import Prediction


class Counts(NamedTuple):
    """The denominators of a step. They count the whole batch, so they depend on neither chunks nor ranks."""

    targets: Float[Tensor, ""]
    pairs: Float[Tensor, ""]
    """Pairs of neighbouring positions of a row that are both scored."""

    @classmethod
    def of(cls, scored: Bool[Tensor, "B T"], device: torch.device | str | None = None) -> Counts:
        """`scored` marks the targets of the whole batch."""
        counts = torch.stack([scored.sum(), (scored[:, 1:] & scored[:, :-1]).sum()]).clamp(min=1)
        targets, pairs = counts.to(torch.float32).to(device or scored.device, non_blocking=True).unbind()
        return cls(targets, pairs)


class Objective(nn.Module):
    """The loss of a model: sums over the rows of a call, divided by the counts of the whole batch.

        loss, nll, memory = objective(ids, targets, memory, lengths)

    The loss is the sum of

        nll                    over targets (0 where they are -1: not scored)
        alpha |h_t|^2          AR of Merity et al. 2017: mean square of the last layer's output, over targets
        beta |h_t - h_t-1|^2   TAR: mean square of its change, over pairs of neighbouring targets
        intermediate_losses    layer l of n also predicts the target, until l / 2n of training (Al-Rfou et al. 2019)
        multiple_targets       a second softmax predicts the token after the target, with half the weight, at every
                               layer that predicts the target; both tokens must be targets of the segment

    DDP and torch.compile wrap this module. It uses the model's weights only through the model's calls, because only
    these gather the weights under FSDP2.
    """

    def __init__(self, model: Any, *, alpha: float = 0.0, beta: float = 0.0):
        super().__init__()
        self.model: Any = model
        self.alpha: float = alpha
        self.beta: float = beta

    def forward(
        self,
        ids: Integer[Tensor, "B T"],
        targets: Integer[Tensor, "B T"],
        memory: Any,
        lengths: Any,
        *,
        counts: Counts | None = None,
        progress: float = 0.0,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B T"], Any]:
        """The loss, the nats of each target, and the memory for the next segment.

        Args:
            counts: None if these targets are the whole batch.
            progress: the share of training that is done, from 0 to 1.
        """
        targets = as_targets(targets, ids.shape)
        scored = targets >= 0
        counts = Counts.of(scored) if counts is None else counts
        prediction, memory = self.model.predict(ids, targets, memory, lengths)
        loss = self._nll(prediction, targets, progress).sum() / counts.targets
        if self.alpha or self.beta:
            loss = loss + self.activity(prediction.outputs[-1], scored, counts)
        return loss, prediction.nll, memory

    def activity(
        self, output: Float[Tensor, "B T D"], scored: Bool[Tensor, "B T"], counts: Counts
    ) -> Float[Tensor, ""]:
        """The sum of AR and TAR, over the `scored` positions."""
        change = output[:, 1:] - output[:, :-1]
        pairs = scored[:, 1:] & scored[:, :-1]
        squares = (_square(output, scored) / counts.targets, _square(change, pairs) / counts.pairs)
        return self.alpha * squares[0] + self.beta * squares[1]

    def _nll(self, prediction: Prediction, targets: Int[Tensor, "B T"], progress: float) -> Float[Tensor, "B T"]:
        """Nats of each target, plus the weighted nats of the auxiliary predictions."""
        config = self.model.config
        if not (config.intermediate_losses or config.multiple_targets):
            return prediction.nll
        nll = self.model.auxiliary_nll
        predicting = [prediction.features]
        if config.intermediate_losses:
            layers = enumerate(prediction.outputs[:-1], start=1)
            predicting += [self.model.dropout(x) for n, x in layers if progress < n / (2 * config.n_layer)]
        total: Any = prediction.nll + sum(nll(x, targets, prediction.tables) for x in predicting[1:])
        if config.multiple_targets:
            later = F.pad(targets[:, 1:], (0, 1), value=-1).where(targets >= 0, -1)
            total = total + 0.5 * sum(nll(x, later, None, second=True) for x in predicting)
        return total


def _square(x: Float[Tensor, "B L D"], counted: Bool[Tensor, "B L"]) -> Float[Tensor, ""]:
    """The sum over positions of the mean square over features."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return (exact.square().mean(-1) * counted).sum()
