"""Adaptive embedding and softmax with tied tables (Baevski & Auli 2019; Grave et al. 2017).

The vocabulary, sorted by frequency, is cut into bands at `cutoffs`. The softmax first chooses among the words of band 0
and one column per further band ("cluster", in the order of the bands), then within the band:

    log p(w) = head[w]                             w in band 0
    log p(w) = head[shortlist + i - 1] + tail_i[w] w in band i
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


class _Bands(nn.Module):
    """Band borders and widths, shared by both ends of the model.

    With div_val 1 the bands are slices of one table; else each has a table of its own width and always a projection.
    """

    def __init__(self, vocab_size: int, d_embed: int, d_model: int, cutoffs: tuple[int, ...], div_val: int):
        super().__init__()
        self.edges = (0, *cutoffs, vocab_size)
        self.div_val = div_val
        self.sizes = [high - low for low, high in pairwise(self.edges)]
        self.widths = [d_embed // div_val**i for i in range(len(self.sizes))]
        self.projected = div_val > 1 or d_embed != d_model
        tables = zip(self.sizes, self.widths, strict=True) if div_val > 1 else [(vocab_size, d_embed)]
        self.tables = nn.ParameterList(nn.Parameter(torch.empty(size, width)) for size, width in tables)


class AdaptiveEmbedding(_Bands):
    """Ids to vectors: look up in the id's band, project to d_model, scale."""

    def __init__(
        self,
        vocab_size: int,
        d_embed: int,
        d_model: int,
        *,
        cutoffs: tuple[int, ...] = (),
        div_val: int = 1,
        scale: float = 1.0,
    ):
        super().__init__(vocab_size, d_embed, d_model, cutoffs, div_val)
        self.d_model, self.scale = d_model, scale
        widths = self.widths[: len(self.tables)] if self.projected else []
        self.projections = nn.ParameterList(nn.Parameter(torch.empty(d_model, width)) for width in widths)

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        if self.div_val == 1:
            x = F.embedding(ids, self.tables[0])
            return self.scale * (F.linear(x, self.projections[0]) if self.projected else x)
        flat = ids.flatten()
        rows = [((flat >= low) & (flat < high)).nonzero(as_tuple=True)[0] for low, high in pairwise(self.edges)]
        # An empty band selects no rows but stays in the graph: data-parallel training waits for its gradient.
        bands = [
            F.linear(F.embedding(flat[row] - low, table), projection)
            for row, low, table, projection in zip(rows, self.edges, self.tables, self.projections, strict=False)
        ]
        grouped = torch.cat(bands)
        x = torch.empty_like(grouped).index_copy(0, torch.cat(rows), grouped)
        return self.scale * x.view(*ids.shape, self.d_model)


class AdaptiveSoftmax(_Bands):
    """Vectors to log-probabilities; losses always come back in the order of the targets.

    Without cutoffs this is a plain softmax.
    """

    def __init__(self, vocab_size: int, d_embed: int, d_model: int, *, cutoffs: tuple[int, ...] = (), div_val: int = 1):
        super().__init__(vocab_size, d_embed, d_model, cutoffs, div_val)
        widths = self.widths if self.projected else []
        self.projections = nn.ParameterList(nn.Parameter(torch.empty(d_model, width)) for width in widths)
        self.bias = nn.Parameter(torch.empty(vocab_size))
        self.cluster_weight = nn.Parameter(torch.empty(len(cutoffs), d_embed)) if cutoffs else None
        self.cluster_bias = nn.Parameter(torch.empty(len(cutoffs))) if cutoffs else None

    def tie(self, embedding: AdaptiveEmbedding, *, weight: bool, projections: tuple[bool, ...] = ()) -> None:
        """Share the embedding's tables and, per band, its projection."""
        if weight:
            self.tables = embedding.tables
        for band, tied in enumerate(projections):
            if tied and self.projected:
                self.projections[band] = embedding.projections[band if self.div_val > 1 else 0]

    def nll(self, hidden: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Nats of each target, in order; 0 where the target is -1, which is not scored."""
        x, flat = hidden.flatten(0, -2), targets.flatten().contiguous()
        weights = self._weights()
        head = _full_precision(self._head(x, *weights[0]))
        if len(self.sizes) == 1:
            return F.cross_entropy(head, flat, ignore_index=-1, reduction="none").view_as(targets)
        shortlist = self.sizes[0]
        band = torch.bucketize(flat, torch.tensor(self.edges[1:-1], device=flat.device), right=True)
        nll = F.cross_entropy(
            head, torch.where(band > 0, shortlist + band - 1, flat), ignore_index=-1, reduction="none"
        )
        for i in range(1, len(self.sizes)):  # also where no target is in the band: see AdaptiveEmbedding
            row = (band == i).nonzero(as_tuple=True)[0]
            scores = F.linear(self._project(x[row], i), *weights[i])
            tail = F.cross_entropy(_full_precision(scores), flat[row] - self.edges[i], reduction="none")
            nll = nll.index_add(0, row, tail)
        return nll.view_as(targets)

    def log_probs(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """Log-probabilities of every symbol; they sum to one."""
        weights = self._weights()
        head = _full_precision(self._head(hidden, *weights[0])).log_softmax(-1)
        shortlist = self.sizes[0]
        tails = [
            head[..., shortlist + i - 1, None]
            + _full_precision(F.linear(self._project(hidden, i), *weights[i])).log_softmax(-1)
            for i in range(1, len(self.sizes))
        ]
        return torch.cat([head[..., :shortlist], *tails], dim=-1)

    def _weights(self) -> list[tuple[Tensor, Tensor]]:
        """Table and bias of each band; split in one go, for every slice of a table has a gradient as large as it."""
        tables = self.tables if self.div_val > 1 else self.tables[0].split(self.sizes)
        return list(zip(tables, self.bias.split(self.sizes), strict=True))

    def _head(self, x: Float[Tensor, "*B D"], weight: Tensor, bias: Tensor) -> Float[Tensor, "*B head"]:
        """Scores of band 0 and of the other bands as wholes."""
        if self.cluster_weight is not None and self.cluster_bias is not None:
            weight, bias = torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        return F.linear(self._project(x, 0), weight, bias)

    def _project(self, x: Float[Tensor, "*B D"], band: int) -> Float[Tensor, "*B E_band"]:
        return x @ self.projections[band] if self.projected else x


def _full_precision(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
