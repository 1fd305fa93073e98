"""Cross entropy of linear scores that are never all in memory: for rows x with targets t, over all columns w,

    nll = log sum_w exp(x . weight[w] + bias[w]) - (x . weight[t] + bias[t])

Forward takes the columns in blocks, and backward computes each block of scores again. A row of weights is read, and
cast under autocast, once for all rows of x. Its gradient is written once, into the gradient of its table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .call import first_derivative, product_dtype

Columns = Sequence[tuple[Tensor, Tensor]]
"""Weights `[n E]` and biases `[n]` of neighbouring columns, in one or more parts."""

_ON_CPU, _ELSEWHERE = 1 << 21, 1 << 26
"""Number of scores in a block. On a CPU: 8 MB of float32, which fit in the cache, and which the C library keeps
between blocks. Elsewhere: enough to keep a device busy."""
_LEAST_ROWS, _LEAST_COLUMNS = 64, 512
"""Treat fewer rows than this as this many, because casting a block has a fixed cost. A block has at least this many
columns."""


def linear_nll(
    rows: Sequence[Float[Tensor, "_ _"]],
    targets: Sequence[Int[Tensor, " _"]],
    columns: Callable[..., Sequence[Columns]],
    parameters: Sequence[Tensor | None],
) -> tuple[Float[Tensor, " _"], ...]:
    """Nats of several softmaxes over columns of the same parameters; 0 where a target is -1. First derivatives only.

    Args:
        rows, targets: one tensor for each softmax.
        columns: a function that cuts the parameters, or tensors of their shapes, into the columns of each softmax. All
            columns are views, and every element must be in one of them.
    """
    return _LinearNLL.apply(columns, product_dtype(rows[0]), targets, len(rows), *rows, *parameters)


class _LinearNLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, columns, dtype, targets, count, *tensors):
        rows, parameters = tensors[:count], tensors[count:]
        results = [_forward(x.to(dtype), t, c) for x, t, c in zip(rows, targets, columns(*parameters), strict=True)]
        nll, total = zip(*results, strict=True)
        ctx.columns, ctx.dtype, ctx.count = columns, dtype, count
        ctx.save_for_backward(*targets, *total, *tensors)
        return nll

    @staticmethod
    @first_derivative
    def backward(ctx, *d_nll):
        n, saved = ctx.count, ctx.saved_tensors
        targets, total, rows, parameters = saved[:n], saved[n : 2 * n], saved[2 * n : 3 * n], saved[3 * n :]
        needed = ctx.needs_input_grad[4 + n :]
        # The gradient of a parameter that needs none is cut like the others, but has no memory.
        buffers = [
            None if p is None else torch.empty_like(p, device=p.device if need else "meta")
            for p, need in zip(parameters, needed, strict=True)
        ]
        into, columns = ctx.columns(*buffers), ctx.columns(*parameters)
        d_rows = [
            _backward(x.to(ctx.dtype), *rest).to(x.dtype)
            for x, *rest in zip(rows, targets, total, d_nll, columns, into, strict=True)
        ]
        return None, None, None, None, *d_rows, *(b if need else None for b, need in zip(buffers, needed, strict=True))


def _forward(x: Tensor, targets: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """nll and, for backward, the log-sum-exp."""
    total = torch.full(targets.shape, -torch.inf, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    score = torch.zeros_like(total)
    for first, weight, bias in _blocks(columns, x):
        scores = _scores(x, weight.to(x.dtype), bias)
        total = torch.logaddexp(total, scores.logsumexp(1))
        column, inside = _column(targets, first, len(weight))
        score += scores.gather(1, column)[:, 0] * inside
    # Not in place: torch 2.11 compiles a result that was written twice to one without gradients.
    return (total - score).masked_fill(targets < 0, 0.0), total


def _backward(x: Tensor, targets: Tensor, total: Tensor, d_nll: Tensor, columns: Columns, into: Columns) -> Tensor:
    """The gradient of x, given that of each nll. The gradient of the columns is written into `into`."""
    d_x = torch.zeros(x.shape, device=x.device, dtype=total.dtype)
    d_nll = d_nll.masked_fill(targets < 0, 0.0)[:, None]
    for (first, weight, bias), (_, d_weight, d_bias) in zip(_blocks(columns, x), _blocks(into, x), strict=True):
        weight = weight.to(x.dtype)
        d_scores = _scores(x, weight, bias).sub_(total[:, None]).exp_()
        column, inside = _column(targets, first, len(weight))
        d_scores.scatter_add_(1, column, -inside[:, None].to(total.dtype)).mul_(d_nll)
        if not d_bias.is_meta:
            d_bias.copy_(d_scores.sum(0))
        d_scores = d_scores.to(x.dtype)
        if not d_weight.is_meta:
            d_weight.copy_(d_scores.mT @ x)
        d_x += d_scores @ weight
    return d_x


def _blocks(columns: Columns, x: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Blocks of the columns for these rows, each with the index of its first column."""
    scores = _ON_CPU if x.is_cpu else _ELSEWHERE
    size, first = max(scores // max(len(x), _LEAST_ROWS), _LEAST_COLUMNS), 0
    for part in columns:
        for weight, bias in zip(*(tensor.split(size) for tensor in part), strict=True):
            yield first, weight, bias
            first += len(weight)


def _scores(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`[n columns]`, laid out by columns, because on a CPU the product is faster with the larger matrix first."""
    scores = (weight @ x.mT).to(torch.promote_types(x.dtype, torch.float32))
    return scores.add_(bias[:, None]).mT


def _column(targets: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Each target's column in a block, `[n 1]`, and whether it is in the block."""
    column = targets - first
    return column.clamp(0, size - 1)[:, None], (column >= 0) & (column < size)
