"""RECL, the relative effective context length (Dai et al. 2019, section 4.3 and appendix C; Table 8, Figures 3 and 4).

For each model i of a group, l_i(c, t) is the loss of target t given exactly the c tokens before it. Then

    b(c, t)     =  min_i l_i(c, t)                                   the baseline: the group's best, given c tokens
    f_i(c, c')  =  mean over t in T of min(b(c, t), l_i(c', t))      T: the share r of targets with the largest b(c, t)
    g_i(c, c')  =  (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)  relative gain, c' = c + step

and RECL is the first c, counted up in steps, at which g_i(c, c') is below the threshold, 0.01. All models must improve
on one baseline, so the RECL of a model depends on the other models of its group.

The first c is one step. T is chosen again at each c and holds round(r x positions) targets, at least one. If gains stay
above the threshold up to the longest context, that context is the answer, marked as not reached. Noise alone counts as
gain, because the minimum in f ignores losses that rise, so a net figure uses g_i(c, c') - g_i(c', c). docs/analysis.md
gives the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from ..config.settings import Lengths, RunConfig
from ..config.shape import ABSOLUTE, RECURRENT
from ..mistake import Mistake
from ..model.transformer_xl import TransformerXL
from ..run.trained import TrainedRun
from ..runtime.device import autocast
from ..runtime.terminal import report_progress

THRESHOLD = 0.01
_AT_A_TIME = 1 << 21
"""Maximum number of position weights in a block of draws: 16 MB."""


def gains(
    losses: Float[np.ndarray, "I L P"], share: float, weights: Integer[np.ndarray, "R P"] | None = None
) -> tuple[Float[np.ndarray, "R I C"], Float[np.ndarray, "R I C"]]:
    """The gains of each model from one more step after each context except the longest: g_i(c, c'), from 0 to 1,
    because losses that rise with a longer context do not count; and in perplexity, as in Figure 3.

    `losses` are in nats at L contexts, shortest first, and P positions. `weights` are the counts of each position in
    each of R draws; None is one draw with each position once.
    """
    if weights is None:
        weights = np.ones((1, losses.shape[2]), np.int64)
    counts = np.maximum(1, np.rint(share * weights.sum(1))).astype(np.int64)[:, None]
    before, after = [], []
    for now, later in zip(losses[:, :-1].swapaxes(0, 1), losses[:, 1:].swapaxes(0, 1), strict=True):
        baseline = now.min(0)
        hardest = np.argsort(-baseline, kind="stable")
        drawn = np.take(weights, hardest, axis=1)  # in rows; an index would leave it in columns
        taken = np.clip(counts - (drawn.cumsum(1) - drawn), 0, drawn)
        before.append(taken @ baseline[hardest] / counts[:, 0])
        after.append(taken @ np.minimum(baseline, later)[:, hardest].T / counts)
    old, new = np.stack(before, -1)[:, None], np.stack(after, -1)  # f(c, c) is the same for every model
    return -np.expm1(new - old), np.exp(old) - np.exp(new)


class EffectiveLength(NamedTuple):
    """Effective context lengths of models, in tokens."""

    tokens: Int[np.ndarray, " I"]
    reached: Bool[np.ndarray, " I"]
    """False: gains stay above the threshold, and `tokens` is the longest context."""
    interval: Int[np.ndarray, "2 I"]


class ReclResult(NamedTuple):
    """Results of each model over the hardest share `r` of positions. Intervals have a lower and an upper end."""

    r: float
    length: EffectiveLength
    """RECL."""
    net: EffectiveLength
    """RECL of the gains minus the gains of going back."""
    relative: Float[np.ndarray, "I C"]
    """g_i(c, c')."""
    relative_interval: Float[np.ndarray, "2 I C"]
    back: Float[np.ndarray, "I C"]
    """g_i(c', c)."""
    perplexity: Float[np.ndarray, "I C"]
    """Gains in perplexity."""
    perplexity_interval: Float[np.ndarray, "2 I C"]


def measure(
    losses: Float[np.ndarray, "I L P"], contexts: Int[np.ndarray, " L"], share: float, draws: Integer[np.ndarray, "R P"]
) -> ReclResult:
    """Compute RECL for one share of positions, with intervals over `draws`."""
    blocks = [None, *np.array_split(draws, 1 + draws.size // _AT_A_TIME)]
    forth = [gains(losses, share, weights) for weights in blocks]
    relative, perplexity = (np.concatenate(each) for each in zip(*forth, strict=True))
    # With contexts in reverse order, each step goes back.
    back = np.concatenate([gains(losses[:, ::-1], share, weights)[0][..., ::-1] for weights in blocks])
    length, net = (effective_length(curve, contexts) for curve in (relative, relative - back))
    curves = (relative[0], middle(relative[1:]), back[0], perplexity[0], middle(perplexity[1:]))
    return ReclResult(share, length, net, *curves)


def effective_length(relative: Float[np.ndarray, "R I C"], contexts: Int[np.ndarray, " L"]) -> EffectiveLength:
    """The length by the relative gains of the first draw at all `contexts` except the longest, with the interval over
    the other draws."""
    below = relative < THRESHOLD
    reached = np.asarray(below.any(-1))
    tokens = contexts[np.where(reached, below.argmax(-1), len(contexts) - 1)]
    return EffectiveLength(tokens[0], reached[0], middle(tokens[1:], method="inverted_cdf").astype(contexts.dtype))


def mean_losses(
    losses: Float[np.ndarray, "I L P"], draws: Integer[np.ndarray, "R P"]
) -> tuple[Float[np.ndarray, "I L"], Float[np.ndarray, "2 I L"]]:
    """Nats per target at each context over all positions (Figure 4), and their interval."""
    again = losses @ (draws / draws.sum(1, keepdims=True)).T
    return losses.mean(-1), middle(np.moveaxis(again, -1, 0))


def middle(values: np.ndarray, method: Literal["linear", "inverted_cdf"] = "linear") -> np.ndarray:
    """The ends of the middle 95 % of the draws, which are the rows."""
    return np.quantile(values, (0.025, 0.975), axis=0, method=method)


def resample(
    positions: Int[np.ndarray, " P"], stretch: int, seed: int, replicates: int = 1000
) -> Int[np.ndarray, "R P"]:
    """The count of each position in each draw. Stretches of text are drawn, because neighbours are correlated."""
    stretches, owner = np.unique(positions // stretch, return_inverse=True)
    number = len(stretches)
    return np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), replicates)[:, owner]


def sample_positions(
    tokens: int, count: int, *, step: int, longest: int, seed: int, documents: Sequence[int] | np.ndarray | None = None
) -> Int[np.ndarray, " P"]:
    """Positions of `count` targets in a text, in order, each with `longest` tokens before it in its document.

    Each stretch of text gives a run of positions a step apart, and a second run only after all others gave one.
    """
    edges = [*([0] if documents is None else documents), tokens]
    most = max(1, min(4 * longest // step, count // 8))
    runs = []
    for begin, end in pairwise(map(int, edges)):
        room = (end - begin - longest) // step  # steps of targets with a full context
        for first in range(0, room, most):
            runs.append((begin + longest + first * step, min(most, room - first)))
    if count > (there := step * sum(size for _, size in runs)):
        raise Mistake(
            f"--positions must be at most {there:,}, the targets with {longest:,} tokens before them, got {count:,}. "
            f"Give more text{', ' if there else ' or '}a lower --max-context{', or fewer positions' if there else ''}."
        )
    chosen, left, random = [], count, np.random.default_rng(seed)
    for phase in random.permutation(step):
        for run in random.permutation(len(runs)):
            first, size = runs[run]
            chosen.append(first + phase + step * np.arange(min(size, left)))
            left -= len(chosen[-1])
            if left == 0:
                return np.sort(np.concatenate(chosen))
    raise AssertionError("there are enough positions")


def feeding_of(config: RunConfig, longest: int) -> tuple[Lengths, str]:
    """The lengths at which `true_losses` reads windows of `longest` tokens by the model of a run, and a description."""
    kind, train, clamp = config.model.base_kind, config.train, config.eval_lengths.clamp_len
    if kind in ABSOLUTE:
        most = min(train.tgt_len, longest)
        description = f"windows of at most the last {most:,} tokens, its training length"
        return Lengths(tgt_len=most, mem_len=0, clamp_len=clamp), description
    description = f"segments of {train.tgt_len:,} after a memory of the whole window; trained with {train.mem_len:,}"
    if kind in RECURRENT:
        description = f"state carried through the window; trained on segments of {train.tgt_len:,}"
    elif clamp is not None:
        description += f", distances beyond {clamp:,} count as {clamp:,}"
    return Lengths(tgt_len=train.tgt_len, mem_len=longest, clamp_len=clamp), description


def losses_of(
    run: TrainedRun,
    ids: Integer[np.ndarray, " N"],
    positions: Int[np.ndarray, " P"],
    contexts: Int[np.ndarray, " L"],
    batch_size: int,
) -> tuple[Float[np.ndarray, "L P"], str]:
    """The losses of a run, which must be finite, and a description of how its model reads. Afterwards the model is not
    in memory."""
    lengths, description = feeding_of(run.config, int(contexts.max()))
    model, precision = run.load().model, run.precision
    found = true_losses(model, ids, positions, contexts, lengths, batch_size=batch_size, precision=precision)
    run.refuse_diverged(found)
    return found, description


def true_losses(
    model: TransformerXL,
    ids: Integer[np.ndarray, " N"],
    positions: Int[np.ndarray, " P"],
    contexts: Int[np.ndarray, " L"],
    lengths: Lengths,
    *,
    batch_size: int = 16,
    precision: str = "fp32",
) -> Float[np.ndarray, "L P"]:
    """Nats of each target given exactly the tokens of each context; without memory, of at most its last `tgt_len`.

    Each window is read once, from an empty memory, for all positions and contexts that begin there: in segments of
    `tgt_len`, with a memory that must hold the whole window if there is one.
    """
    contexts = contexts if lengths.mem_len else np.minimum(contexts, lengths.tgt_len)
    assert lengths.mem_len == 0 or lengths.mem_len >= contexts.max(), "memory must hold the window"
    starts, window = np.unique(positions - contexts[:, None], return_inverse=True)
    window = window.reshape(len(contexts), len(positions))
    offsets, column = np.unique(contexts, return_inverse=True)
    widths = np.zeros(len(starts), np.int64)
    np.maximum.at(widths, window, contexts[:, None])
    longest_first = np.argsort(-widths, kind="stable")
    found = np.full((len(starts), len(offsets)), np.nan)
    device = next(model.parameters()).device
    with torch.no_grad(), autocast(precision, device):
        reader = model.for_inference(precision)
        for first in report_progress(range(0, len(starts), batch_size), "scoring windows"):
            rows = longest_first[first : first + batch_size]
            width = int(widths[rows[0]])
            span = starts[rows, None] + np.arange(width + 1)
            tokens = torch.from_numpy(ids[np.minimum(span, len(ids) - 1)].astype(np.int64)).to(device)
            scored = offsets[offsets <= width]
            found[rows, : len(scored)] = _window_losses(reader, tokens, scored.tolist(), lengths).double().cpu().numpy()
    return found[window, column[:, None]]


def _window_losses(
    model: TransformerXL, tokens: Int[Tensor, "B W"], offsets: list[int], lengths: Lengths
) -> Float[Tensor, "B O"]:
    """Nats of the tokens at `offsets`. No others are scored."""
    memory, features = model.empty_cache(len(tokens), lengths), []
    for segment in tokens[:, :-1].split(lengths.tgt_len, dim=1):
        hidden, memory = model.hidden(segment, memory, lengths)
        features.append(hidden)
    before = [offset - 1 for offset in offsets]
    return model.softmax.nll(torch.cat(features, dim=1)[:, before], tokens[:, offsets])
