"""Sliding windows evaluate a Transformer without memory (Al-Rfou et al. 2019; Dai et al., figure 1b): the model
reads the text before a target again for that target. Each window scores `stride` targets.

With context 4 and stride 2, the prediction after each token of a text a b c d e f g h i sees:

    a: a      c: a b c      e: c d e       g: e f g       i: g h i
    b: a b    d: a b c d    f: c d e f     h: e f g h

Two predictions share a window. With stride 1 each has its own window of `context` tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from ..config.settings import Lengths, TransformerXLConfig
from ..mistake import Mistake
from ..model.adaptive import AdaptiveSoftmax
from ..model.modules import as_ids
from .score import Reader

_TOKENS = 1 << 13
"""Approximate number of tokens in a batch of windows."""


class Window(NamedTuple):
    """The last tokens of each row, oldest first, that a window may still contain."""

    ids: Int[Tensor, "B L"]
    seen: Int[Tensor, " B"]
    """Number of tokens of each row's text so far; -n: the next n tokens are padding."""

    def extend(self, ids: Int[Tensor, "B T"], *, kept: int) -> Window:
        """Append these tokens and keep the newest `kept`."""
        both = torch.cat([self.ids, ids], dim=1)
        return Window(both[:, max(both.shape[1] - kept, 0) :], self.seen + ids.shape[1])

    def select(self, rows: Int[Tensor, " R"] | slice) -> Window:
        """The given rows (streams), in the given order."""
        return Window(self.ids[rows], self.seen[rows])

    def reset(self, rows: Bool[Tensor, " B"]) -> Window:
        """Begin a new text in the marked rows; keep the others."""
        return self._replace(seen=self.seen.masked_fill(rows.to(self.seen.device), 0))


class Sliding(nn.Module):
    """A model with the methods of `model`, whose predictions see the last tokens and no memory.

    The prediction after token t of a row's text (from 0) sees min(t + 1, context - stride + 1 + t % stride) tokens, t
    included, however the text is cut into segments. A call uses only `clamp_len` of its `Lengths`.
    """

    takes_padding = True

    def __init__(self, model: Reader, context: int, stride: int = 1):
        super().__init__()
        if not 1 <= stride <= context:
            raise Mistake(
                f"The stride of sliding windows must be from 1 to their width, {context} tokens, got {stride}."
            )
        self.model: Reader = model
        self.config: TransformerXLConfig = model.config
        self.context: int = context
        self.stride: int = stride

    @property
    def softmax(self) -> AdaptiveSoftmax:
        return self.model.softmax

    def forward(
        self, ids: Integer[Tensor, "B T"], targets: Integer[Tensor, "B T"], memory: Window | None, lengths: Lengths
    ) -> tuple[Float[Tensor, "B T"], Window]:
        """Nats of each target (0 where it is -1), and the state for the next segment."""
        hidden, after = self.hidden(ids, memory, lengths)
        return self.softmax.nll(hidden, targets), after

    def log_probs(
        self, ids: Integer[Tensor, "B T"], memory: Window | None, lengths: Lengths, last: int | None = None
    ) -> tuple[Float[Tensor, "B L V"], Window]:
        """Log-probabilities after each position, or after the `last` ones; only their windows are read."""
        hidden, after = self.hidden(ids, memory, lengths, last)
        return self.softmax.log_probs(hidden), after

    def hidden(
        self, ids: Integer[Tensor, "B T"], memory: Window | None, lengths: Lengths, last: int | None = None
    ) -> tuple[Float[Tensor, "B L D"], Window]:
        """Features of each position (L = T), or of the `last` ones (L = last), and the state for the next segment."""
        ids = as_ids(ids)
        memory = self.empty_memory(len(ids), lengths) if memory is None else memory
        if not isinstance(memory, Window) or len(memory.ids) != len(ids):
            rows = f"of {len(memory.ids)} rows" if isinstance(memory, Window) else type(memory).__name__
            raise Mistake(f"memory must be a Window of {len(ids)} rows, as ids have, got {rows}.")
        read = Lengths(tgt_len=self.context, mem_len=0, clamp_len=lengths.clamp_len)
        wanted = memory.seen[:, None] + torch.arange(ids.shape[1], device=ids.device)
        wanted = wanted if last is None else wanted[:, ids.shape[1] - last :]
        windows, scored, found = self._windows(torch.cat([memory.ids, ids], dim=1), memory.seen + ids.shape[1], wanted)
        rows = max(_TOKENS // windows.shape[1], 1)
        parts = []
        for some, positions in zip(windows.split(rows), scored.split(rows), strict=True):
            x, _ = self.model.hidden(some, self.model.empty_memory(len(some), read), read)
            parts.append(_pick(x, positions))
        features = torch.cat(parts).unflatten(0, (len(ids), -1)).flatten(1, 2)
        return _pick(features, found), memory.extend(ids, kept=self.context - 1)

    def _windows(
        self, text: Int[Tensor, "B S"], end: Int[Tensor, " B"], wanted: Int[Tensor, "B L"]
    ) -> tuple[Int[Tensor, "W C"], Int[Tensor, "W R"], Int[Tensor, "B L"]]:
        """Windows, the same number for each row; the positions that each window scores; and the index of each wanted
        position among the scored ones of its row. `end`: number of tokens of each row's text at the end of `text`."""
        stride, device = self.stride, text.device
        first = wanted[:, :1].clamp(min=0) // stride
        count = int((wanted[:, -1:].clamp(min=0) // stride - first).max()) + 1
        begin = (first + torch.arange(count, device=device)) * stride  # first to score
        start = (begin + stride - self.context).clamp(min=0)
        width = int((torch.minimum(begin + stride, end[:, None]) - start).max())
        # A window that ends early is filled up on the right, where causality makes any token harmless.
        position = (text.shape[1] - end)[:, None, None] + start[..., None] + torch.arange(width, device=device)
        windows = text.gather(1, position.clamp(max=text.shape[1] - 1).flatten(1)).view(-1, width)
        scored = (begin - start)[..., None] + torch.arange(stride, device=device)
        return windows, scored.clamp(max=width - 1).flatten(0, 1), (wanted - first * stride).clamp(min=0)

    def empty_memory(self, batch: int, lengths: Lengths, valid: Int[Tensor, " B"] | None = None) -> Window:
        """The state before the first token of `batch` streams; `valid` -n: the first n tokens are padding."""
        device = next(self.parameters()).device
        seen = torch.zeros(batch, dtype=torch.int64, device=device) if valid is None else valid.to(device)
        return Window(torch.zeros(batch, 0, dtype=torch.int64, device=device), seen)

    empty_cache = empty_memory  # because every window is read again

    def for_inference(self, precision: str = "fp32") -> Sliding:
        """A copy for inference."""
        return Sliding(self.model.for_inference(precision), self.context, self.stride)


def _pick(x: Float[Tensor, "W C D"], positions: Int[Tensor, "W R"]) -> Float[Tensor, "W R D"]:
    return x.gather(1, positions[..., None].expand(-1, -1, x.shape[2]))
