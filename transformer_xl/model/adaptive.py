"""Adaptive embedding and softmax with tied tables (Baevski & Auli 2019; Grave et al. 2017).

The vocabulary, sorted by frequency, is cut into bands at `cutoffs`. The softmax first chooses among the tokens of band
0 and one "cluster" column for each further band, in the order of the bands. Then it chooses within the band:

    log p(w) = head[w]                             w in band 0
    log p(w) = head[shortlist + i - 1] + tail_i[w] w in band i
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..config.settings import TransformerXLConfig
from ..mistake import Mistake
from ..ops.call import first_derivative, in_transform
from ..ops.cross_entropy import Columns, linear_nll
from ..ops.dropout import word_dropout
from .modules import Ids, Vectors, as_ids, as_targets

_FEW_ROWS = 512
"""On a GPU the gradient of a table with at most this many rows is a product, because sorting the ids takes longer."""
MOST_SCORES = 1 << 24
"""Maximum number of scores of the whole vocabulary held at once."""


class _Bands(nn.Module):
    """Bands and their tables: slices of one table if `div_val` is 1, otherwise each a table of its own width."""

    def __init__(self, config: TransformerXLConfig, *, per_table: bool):
        """If there are projections: with `per_table` one of each table, otherwise one of each band."""
        super().__init__()
        vocab_size, width, div_val = config.vocab_size, config.embed_width, config.div_val
        if vocab_size < 1:
            raise Mistake(f"vocab_size must be at least 1 to build a model, got {vocab_size}. Name the size.")
        self.edges: tuple[int, ...] = (0, *config.cutoffs, vocab_size)
        self.div_val: int = div_val
        self.sizes: list[int] = [high - low for low, high in pairwise(self.edges)]
        self.widths: list[int] = [width // div_val**i for i in range(len(self.sizes))]
        self.projected: bool = div_val > 1 or width != config.d_model
        tables = zip(self.sizes, self.widths, strict=True) if div_val > 1 else [(vocab_size, width)]
        self.tables: nn.ParameterList = nn.ParameterList(
            nn.Parameter(torch.empty(size, width)) for size, width in tables
        )
        widths = self.widths[: len(self.tables)] if per_table else self.widths
        self.projections: nn.ParameterList = nn.ParameterList(
            nn.Parameter(torch.empty(config.d_model, width)) for width in (widths if self.projected else ())
        )

    def _band(self, ids: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """The band of each id; 0 for -1."""
        return sum((ids >= edge for edge in self.edges[1:-1]), start=torch.zeros_like(ids))

    def _rows(self, band: Int[Tensor, " n"]) -> tuple[Tensor, ...]:
        """The positions of each band; the host waits for the device once."""
        sizes = torch.stack([(band == i).sum() for i in range(len(self.sizes))]).tolist()
        return band.argsort(stable=True).split(sizes)


class AdaptiveEmbedding(_Bands):
    """Look up each id in its band's table, project to d_model and scale. In training, also drop some words."""

    def __init__(self, config: TransformerXLConfig):
        super().__init__(config, per_table=True)
        self.d_model: int = config.d_model
        self.scale: float = float(config.input_scale)
        self.dropout_words: float = config.dropout_words

    def forward(self, ids: Ids) -> Vectors:
        return self.lookup(ids)[0]

    def lookup(self, ids: Ids) -> tuple[Vectors, tuple[Tensor, ...]]:
        """The vectors, and the tables to give to the `nll` of a tied softmax.

        The softmax's gradient of the tables then passes through this function, which adds the gradient of the rows in
        place. Otherwise embedding and softmax would each allocate a gradient as large as the tables.
        """
        ids = as_ids(ids)
        try:
            x, tables = self._vectors(ids)
        except IndexError as error:
            got = f"{int(ids.min())} to {int(ids.max())}"
            raise Mistake(f"ids must be from 0 to {self.edges[-1] - 1}, got {got}.") from error
        return word_dropout(x, ids, self.dropout_words if self.training else 0.0, self.edges[-1]), tables

    def _vectors(self, ids: Int[Tensor, "B T"]) -> tuple[Vectors, tuple[Tensor, ...]]:
        if self.div_val == 1:
            x, table = _look_up(ids, self.tables[0])
            return self.scale * (F.linear(x, self.projections[0]) if self.projected else x), (table,)
        flat = ids.flatten()
        # Neither an exported graph nor vmap has sizes that depend on the ids.
        if torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active():
            return self.scale * self._sum_of_bands(flat).view(*ids.shape, self.d_model), tuple(self.tables)
        rows = self._rows(self._band(flat))
        # An empty band selects no rows but stays in the graph: data-parallel training waits for its gradient.
        bands = zip(rows, self.edges, self.tables, strict=False)
        vectors, tables = zip(*(_look_up(flat[row] - low, table) for row, low, table in bands), strict=True)
        grouped = torch.cat([F.linear(*pair) for pair in zip(vectors, self.projections, strict=True)])
        x = torch.empty_like(grouped).index_copy(0, torch.cat(rows), grouped)
        return self.scale * x.view(*ids.shape, self.d_model), tables

    def _sum_of_bands(self, ids: Int[Tensor, " n"]) -> Float[Tensor, "n D"]:
        """The projected row of each id's band, and zeros from the other bands."""
        band, parts = self._band(ids), []
        for i, (low, table, projection) in enumerate(zip(self.edges, self.tables, self.projections, strict=False)):
            rows = F.embedding((ids - low).where(band == i, 0), table)
            parts.append(F.linear(rows, projection).masked_fill((band != i)[:, None], 0.0))
        return torch.stack(parts).sum(0)


def _look_up(ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a table, and the table. Where one token is read at a time, the autograd function would take longer."""
    plain = not torch.is_grad_enabled() or in_transform()
    return (F.embedding(ids, table), table) if plain else _Lookup.apply(ids, table)


class _Lookup(torch.autograd.Function):
    """Returns rows of a table, and the table; adds both gradients in one tensor."""

    @staticmethod
    def forward(ctx, ids, table):
        ctx.save_for_backward(ids)
        ctx.shape = table.shape
        ctx.set_materialize_grads(False)
        return F.embedding(ids, table), table.view_as(table)

    @staticmethod
    @first_derivative
    def backward(ctx, d_x, d_table):
        (ids,) = ctx.saved_tensors
        if d_x is None:
            return None, d_table
        if d_table is None:
            d_table = d_x.new_zeros(ctx.shape)
        return None, add_rows(d_table, ids.flatten(), d_x.flatten(0, -2))


def add_rows(table: Float[Tensor, "V E"], ids: Int[Tensor, " n"], rows: Float[Tensor, "n E"]) -> Float[Tensor, "V E"]:
    """The table with each of these rows added to its row of this id, in place, and in an order that repeats."""
    if table.is_cpu:
        return table.index_add_(0, ids, rows)
    if len(table) > _FEW_ROWS:
        return table.index_put_((ids,), rows, accumulate=True)
    marks = ids == torch.arange(len(table), device=ids.device)[:, None]
    return table.addmm_(marks.to(rows.dtype), rows)


class AdaptiveSoftmax(_Bands):
    """Log-probabilities from vectors. Losses are arranged like the targets.

    Without cutoffs this is a plain softmax.
    """

    def __init__(self, config: TransformerXLConfig):
        super().__init__(config, per_table=False)
        self.bias: nn.Parameter = nn.Parameter(torch.empty(config.vocab_size))
        self.cluster_weight: nn.Parameter | None = None
        self.cluster_bias: nn.Parameter | None = None
        if config.cutoffs:
            self.cluster_weight = nn.Parameter(torch.empty(len(config.cutoffs), config.embed_width))
            self.cluster_bias = nn.Parameter(torch.empty(len(config.cutoffs)))
        self.temperature: float = 1.0
        """For evaluation: `nll` divides the log-probabilities by it and normalises them again."""

    def tie(self, embedding: AdaptiveEmbedding, *, weight: bool, projections: tuple[bool, ...] = ()) -> None:
        """Share the embedding's tables and, per band, its projection.

        Each module keeps a `ParameterList` of its own. `torch.func.functional_call` would take a shared list for
        two lists, and would not put the original weights back.
        """
        if weight:
            self.tables: nn.ParameterList = nn.ParameterList(embedding.tables)
        for band, tied in enumerate(projections):
            if tied and self.projected:
                self.projections[band] = embedding.projections[band if self.div_val > 1 else 0]

    def is_tied(self, embedding: AdaptiveEmbedding) -> bool:
        """Whether they share their tables now: anyone may replace weights."""
        return all(own is other for own, other in zip(self.tables, embedding.tables, strict=True))

    def nll(
        self, hidden: Vectors, targets: Ids, tables: tuple[Float[Tensor, "_ _"], ...] | None = None
    ) -> Float[Tensor, "B T"]:
        """Loss of each target in nats; 0 where the target is -1 (not scored).

        Args:
            tables: the tables that the embedding's `lookup` returned, if this softmax is tied to them.
        """
        targets = as_targets(targets, hidden.shape[:-1])
        x, flat = hidden.flatten(0, -2), targets.flatten()
        if self.temperature != 1:
            rows = max(MOST_SCORES // self.edges[-1], 1)
            parts = zip(x.split(rows), flat.split(rows), strict=True)
            return torch.cat([self._tempered_nll(*part) for part in parts]).view_as(targets)
        if in_transform():  # all derivatives, in plain PyTorch
            scored = flat.clamp(min=-1)
            return F.nll_loss(self.log_probs(x), scored, ignore_index=-1, reduction="none").view_as(targets)
        if flat.is_cuda or torch.compiler.is_compiling():  # the error comes later, so nothing waits for the device
            torch.ops.aten._assert_async.msg((flat < self.edges[-1]).all(), "a target is out of range")
        elif flat.is_cpu and (flat >= self.edges[-1]).any():
            raise Mistake(f"targets must be at most {self.edges[-1] - 1}, got {int(flat.max())}.")
        band = self._band(flat)
        inputs, columns = [self._project(x, 0)], [torch.where(band > 0, self.sizes[0] - 1 + band, flat)]
        tails = self._rows(band)[1:] if len(self.sizes) > 1 else ()
        for i, row in enumerate(tails, start=1):  # also for a band without targets: see AdaptiveEmbedding
            inputs.append(self._project(x[row], i))
            columns.append(flat[row] - self.edges[i])
        head, *rest = linear_nll(inputs, columns, self._columns, self._score_weights(tables))
        return head.index_add(0, torch.cat(tails), torch.cat(rest)).view_as(targets) if tails else head.view_as(targets)

    def _tempered_nll(self, hidden: Float[Tensor, "n D"], targets: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        scores = self.log_probs(hidden)
        least = torch.finfo(scores.dtype).tiny  # no overflow, because the largest is 0
        scores = (scores - scores.amax(dim=-1, keepdim=True)) / max(self.temperature, least)
        return F.cross_entropy(scores, targets, ignore_index=-1, reduction="none")

    def forward(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        return self.log_probs(hidden)

    def log_probs(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """Log-probabilities of the whole vocabulary."""
        logs = []
        for band, columns in enumerate(self._columns(*self._score_weights())):
            x = self._project(hidden, band)
            parts = [F.linear(x, weight, bias) for weight, bias in columns]
            scores = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
            logs.append(scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(-1))
        (head, *tails), shortlist = logs, self.sizes[0]
        if not tails:
            return head
        tails = [head[..., shortlist + i, None] + tail for i, tail in enumerate(tails)]
        return torch.cat([head[..., :shortlist], *tails], dim=-1)

    def _score_weights(self, tables: tuple[Tensor, ...] | None = None) -> tuple[Tensor | None, ...]:
        """All parameters except the projections."""
        tables = tuple(self.tables) if tables is None else tables  # torch 2.11 cannot compile `*self.tables`
        return self.bias, self.cluster_weight, self.cluster_bias, *tables

    def _columns(self, bias, cluster_weight, cluster_bias, *tables) -> list[Columns]:
        """Weight and bias of each band's columns. One split, because a slice's gradient is as large as the table."""
        if len(self.sizes) == 1:
            return [[(tables[0], bias)]]
        tables = tables if self.div_val > 1 else tables[0].split(self.sizes)
        head, *tails = ([part] for part in zip(tables, bias.split(self.sizes), strict=True))
        return [[*head, (cluster_weight, cluster_bias)], *tails]

    def _project(self, x: Float[Tensor, "*B D"], band: int) -> Float[Tensor, "*B E_band"]:
        return x @ self.projections[band] if self.projected else x
