"""The textbook formulation: the original code's arithmetic, batch first, in plain PyTorch.

One large attention with the paper's pad-and-view shift (appendix B) and a mask; queries, keys and values of memory and
segment projected together in every segment, the position table in every layer; an adaptive softmax that picks the rows
of each band by a mask. Its parameters have the names of `TransformerXL`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ours import Op, read_weights

State = list[Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, r: Tensor, content_bias: Tensor, position_bias: Tensor, dropatt=0.0):
    """Attention of q [B H T K], k [B H S K], r [H S K]: scores in full, shifted by padding and a new view."""
    (queries, size), keys = q.shape[2:], k.shape[2]
    by_content = (q + content_bias[:, None]) @ k.mT
    by_distance = (q + position_bias[:, None]) @ r.mT
    padded = F.pad(by_distance, (1, 0)).flatten(2)
    shifted = padded[:, :, queries:].unflatten(2, (queries, keys))
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1 + keys - queries)
    score = ((by_content + shifted) * size**-0.5).masked_fill(hidden, float("-inf"))
    return F.dropout(score.softmax(-1), dropatt) @ v


class Attention(nn.Module):
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.n_head, self.dropout, self.dropatt = sizes["n_head"], sizes["dropout"], sizes["dropatt"]
        width = sizes["n_head"] * sizes["d_head"]
        self.qkv = nn.Linear(sizes["d_model"], 3 * width, bias=False)
        self.position = nn.Linear(sizes["d_model"], width, bias=False)
        self.output = nn.Linear(width, sizes["d_model"], bias=False)
        self.norm = nn.LayerNorm(sizes["d_model"], sizes["layer_norm_epsilon"])

    def forward(self, x: Tensor, past: Tensor, encodings: Tensor, content_bias: Tensor, position_bias: Tensor):
        heads = [self._heads(part) for part in self.qkv(torch.cat([past, x], 1)).chunk(3, -1)]
        q, k, v = heads[0][:, :, past.shape[1] :], heads[1], heads[2]
        biases = content_bias.to(q.dtype), position_bias.to(q.dtype)
        dropatt = self.dropatt if self.training else 0.0
        attended = attend(q, k, v, self._heads(self.position(encodings)), *biases, dropatt=dropatt)
        out = self.output(attended.transpose(1, 2).flatten(2))
        return self.norm(x + F.dropout(out, self.dropout, self.training))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_head, -1)).transpose(-2, -3)


class FeedForward(nn.Module):
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.dropout = sizes["dropout"]
        self.inner = nn.Linear(sizes["d_model"], sizes["d_inner"])
        self.outer = nn.Linear(sizes["d_inner"], sizes["d_model"])
        self.norm = nn.LayerNorm(sizes["d_model"], sizes["layer_norm_epsilon"])

    def forward(self, x: Tensor) -> Tensor:
        inner = F.dropout(F.relu(self.inner(x)), self.dropout, self.training)
        return self.norm(x + F.dropout(self.outer(inner), self.dropout, self.training))


class Layer(nn.Module):
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        return self.feed_forward(self.attention(x, *context))


class Softmax(nn.Module):
    """Bands of one table, as wide as the model."""

    def __init__(self, sizes: dict[str, Any], table: nn.Parameter) -> None:
        super().__init__()
        self.edges = [0, *sizes["cutoffs"], sizes["vocab_size"]]
        clusters = len(sizes["cutoffs"])
        self.tables = nn.ParameterList([table])
        self.bias = nn.Parameter(torch.zeros(sizes["vocab_size"]))
        if clusters:
            self.cluster_weight = nn.Parameter(torch.zeros(clusters, sizes["d_model"]))
            self.cluster_bias = nn.Parameter(torch.zeros(clusters))

    def nll(self, x: Tensor, targets: Tensor) -> Tensor:
        if len(self.edges) == 2:
            return F.cross_entropy(self._head(x).float(), targets, reduction="none")
        head = self._head(x).float().log_softmax(-1)
        nll = torch.zeros_like(head[:, 0])
        for band, (low, high) in enumerate(pairwise(self.edges)):
            rows = ((targets >= low) & (targets < high)).nonzero().squeeze(1)
            if band == 0:
                nll = nll.index_copy(0, rows, -head[rows].gather(1, targets[rows, None])[:, 0])
            elif len(rows):
                tail = self._tail(x[rows], low, high).log_softmax(-1).gather(1, targets[rows, None] - low)[:, 0]
                nll = nll.index_copy(0, rows, -(head[rows, self.edges[1] + band - 1] + tail))
        return nll

    def log_probs(self, x: Tensor) -> Tensor:
        head = self._head(x).float().log_softmax(-1)
        shortlist = self.edges[1]
        tails = [
            head[:, shortlist + i, None] + self._tail(x, low, high).log_softmax(-1)
            for i, (low, high) in enumerate(pairwise(self.edges[1:]))
        ]
        return torch.cat([head[:, :shortlist], *tails], -1)

    def _head(self, x: Tensor) -> Tensor:
        table, bias = self.tables[0][: self.edges[1]], self.bias[: self.edges[1]]
        if len(self.edges) > 2:
            table, bias = torch.cat([table, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        return F.linear(x, table, bias)

    def _tail(self, x: Tensor, low: int, high: int) -> Tensor:
        return F.linear(x, self.tables[0][low:high], self.bias[low:high]).float()


class Embedding(nn.Module):
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(torch.zeros(sizes["vocab_size"], sizes["d_model"]))])


class Model(nn.Module):
    """Hidden states of a segment, and the memory after it."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = Embedding(sizes)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes["n_layer"]))
        biases = (sizes["n_layer"] if sizes["untie_r"] else 1, sizes["n_head"], sizes["d_head"])
        self.content_bias = nn.Parameter(torch.zeros(biases))
        self.position_bias = nn.Parameter(torch.zeros(biases))
        self.softmax = Softmax(sizes, self.embedding.tables[0])

    def forward(self, ids: Tensor, state: State, mem_len: int) -> tuple[Tensor, State]:
        width, p = self.sizes["d_model"], self.sizes["dropout"]
        x = F.dropout(F.embedding(ids, self.embedding.tables[0]) * width**0.5, p, self.training)
        length = state[0].shape[1] + ids.shape[1]
        distance = torch.arange(length - 1, -1, -1.0, device=ids.device)
        angle = torch.outer(distance, 10000 ** -(torch.arange(0, width, 2.0, device=ids.device) / width))
        encodings = F.dropout(torch.cat([angle.sin(), angle.cos()], -1), p, self.training)
        after = []
        for i, (layer, past) in enumerate(zip(self.layers, state, strict=True)):
            after.append(torch.cat([past, x], 1)[:, max(length - mem_len, 0) :].detach())
            own = i if self.sizes["untie_r"] else 0
            x = layer(x, past, encodings, self.content_bias[own], self.position_bias[own])
        return F.dropout(x, p, self.training), after


class Textbook:
    """The model as a contender."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, sizes = job, job["model"]
        projected = sizes["div_val"] > 1 or sizes["d_embed"] not in (None, sizes["d_model"])
        given = [name for name in ("pre_lnorm", "final_norm", "qk_norm", "ngrams", "relu_output") if sizes[name]]
        given += ["gate"] * (sizes["gate"] != "none")
        if lacks := ["projected embeddings"] * projected + given:
            raise NotImplementedError(f"the textbook model has no {' and no '.join(lacks)}")
        self.module = Model(sizes)
        self.module.load_state_dict({name.removeprefix("backbone."): x for name, x in read_weights(job).items()})
        self.module.to(job["device"])

    def state(self, batch: int, length: int) -> State:
        shape = (batch, length, self.job["model"]["d_model"])
        return [torch.zeros(shape, device=self.job["device"]) for _ in self.module.layers]

    def score(self, ids: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, state = self.module(ids, state, self.job["mem_len"])
        return self.module.softmax.nll(hidden.flatten(0, 1), targets.flatten()).view_as(targets), state

    def following(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, state = self.module(ids, state, self.job["mem_len"])
        return self.module.softmax.log_probs(hidden[:, -1]), state


class TextbookOp(Op):
    """The attention alone."""

    def attention(self, job: dict[str, Any]) -> Callable[..., Tensor]:
        return attend
