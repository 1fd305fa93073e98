"""Dynamic evaluation (Krause et al. 2018, and 2019 for Transformers): the weights learn from the text that they score.

Each segment is scored first. Then the weights w, trained to be w0, take one step down the gradient g of its mean loss:

    sgd    w <- w - lr g             + min(decay, 1)   (w0 - w)
    rms    w <- w - lr g / (r + eps) + min(decay r, 1) (w0 - w)

For each weight, r is the root of its mean squared gradient over segments of a training text, divided by the mean of
these roots over all weights. So `lr` has the same scale in both rules; they are the same if every r is 1 and eps is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..config.problems import Checked, Problem, out_of_bounds
from ..config.settings import Lengths
from ..data.loader import Segment
from ..mistake import Mistake
from ..model.transformer_xl import TransformerXL
from ..ops.call import product_dtype
from ..runtime.device import autocast, sums_on
from .score import Scoring, State
from .sliding import Sliding

Model = TransformerXL | Sliding


@dataclass(frozen=True, kw_only=True)
class DynamicConfig(Checked):
    """How the weights learn from the text."""

    rule: Literal["sgd", "rms"] = "rms"
    lr: float = 0.1
    decay: float = 0.0
    """Each step reduces the difference to the trained weights by this share."""
    epsilon: float = 0.1
    """rms: bounds the steps of weights with small gradients."""
    tokens: int = 10_000
    """rms: measure gradients over this many targets of the training text; 0: over all."""

    def _problems(self) -> Iterator[Problem]:
        yield from out_of_bounds(self, "decay", "epsilon", "tokens", least=0)
        yield from out_of_bounds(self, "lr", least=0, most=1e30)
        if self.rule == "rms" and self.epsilon == 0:
            yield Problem(("epsilon",), "{} must be above 0, got 0, because some weights never had a gradient.")


class Dynamic(nn.Module):
    """A model for `evaluate`: the copy that `for_inference` returns learns from each call, after scoring it.

    The copy starts from the trained weights, and `model` does not change. With several rows a step uses their mean
    gradient, so a row learns from text after its own; papers use one row. A reset empties the memory and keeps the
    weights. The rule "rms" needs the result of `relative_rms` as `rms`.
    """

    def __init__(self, model: Model, config: DynamicConfig, rms: Sequence[Float[Tensor, "*_"]] | None = None):
        super().__init__()
        self.model: Model = model
        self.config: DynamicConfig = config
        self.rms: Sequence[Tensor] | None = rms
        self.trained: list[nn.Parameter] | None = None

    def for_inference(self, precision: str = "fp32") -> Dynamic:
        """A copy that learns."""
        learner = Dynamic(deepcopy(self.model).eval(), self.config, self.rms)
        learner.trained = list(self.model.parameters())
        return learner

    def forward(
        self, ids: Int[Tensor, "B T"], targets: Int[Tensor, "B T"], memory: State | None, lengths: Lengths
    ) -> tuple[Float[Tensor, "B T"], State]:
        """Nats of each target by the weights before the step, and the memory for the next segment."""
        nll, memory, gradients = _gradients(self.model, ids, targets, memory, lengths)
        self._learn(gradients)
        return nll, memory

    @torch.no_grad()
    def _learn(self, gradients: Sequence[Tensor | None]) -> None:
        assert self.trained is not None, "the trained weights must not change: call for_inference first"
        assert self.rms or self.config.rule == "sgd", "the rule rms needs the result of relative_rms"
        how, ones = self.config, [None] * len(self.trained)
        for w, w0, g, r in zip(self.model.parameters(), self.trained, gradients, self.rms or ones, strict=True):
            if g is None:
                continue
            if how.decay:
                w.lerp_(w0, min(how.decay, 1.0) if r is None else (how.decay * r).clamp(max=1))
            if r is None:
                w.sub_(g, alpha=how.lr)
            else:
                w.addcdiv_(g, r + how.epsilon, value=-how.lr)
        torch.clear_autocast_cache()  # it holds casts of the old weights

    def empty_cache(self, batch: int, lengths: Lengths, valid: Int[Tensor, " B"] | None = None) -> State:
        """The state before the first token: a memory, because a cache would hold keys from older weights."""
        return self.model.empty_memory(batch, lengths, valid)


def relative_rms(
    model: Model, loader: Iterable[Segment], lengths: Lengths, *, precision: str = "fp32"
) -> list[Float[Tensor, "*_"]]:
    """For each weight, the root of its mean squared gradient over the segments, divided by the mean of all roots."""
    model = deepcopy(model, {id(p): p for p in model.parameters()}).eval()  # new modules of the same parameters
    squares = [torch.zeros_like(p) for p in model.parameters()]
    device, segments = squares[0].device, 0
    memory: State | None = None
    for segment in loader:
        if memory is None:
            memory = model.empty_memory(len(segment.ids), lengths)
        elif segment.reset is not None:
            memory = memory.reset(segment.reset)
        with autocast(precision, device):
            call = (segment.ids.to(device), segment.targets.to(device), memory, lengths)
            _, memory, gradients = _gradients(model, *call)
        segments += 1
        for square, gradient in zip(squares, gradients, strict=True):
            if gradient is not None:
                square.addcmul_(gradient, gradient)
    assert segments, "there must be a segment to measure gradients on"
    roots = [square.div_(segments).sqrt_() for square in squares]
    total = sum(root.to(sums_on(device)).sum(dtype=torch.float64).item() for root in roots)
    mean = total / sum(root.numel() for root in roots)
    return [root.div_(mean) for root in roots]


@torch.enable_grad()
def _gradients(
    model: Scoring, ids: Tensor, targets: Tensor, memory: State | None, lengths: Lengths
) -> tuple[Tensor, State, list[Tensor | None]]:
    """The detached nll and the memory of a call, and the gradient of the mean nll for each weight, or None.

    Without a scale of the loss, which training has, many gradients in fp16 would be 0.
    """
    if product_dtype(next(model.parameters())) == torch.float16:
        raise Mistake("precision must be fp32 or bf16 for dynamic evaluation, got fp16.")
    nll, memory = model(ids, targets, memory, lengths)
    mean = nll.sum() / (targets >= 0).sum().clamp(min=1)
    gradients = torch.autograd.grad(mean, list(model.parameters()), allow_unused=True)
    return nll.detach(), memory, [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]
