"""Recurrent language models as Merity et al. 2018 regularise them: AWD-LSTM, and the QRNN of Bradbury et al. 2017.

    LSTM    torch.nn.LSTM
    QRNN    z, f, o = tanh, sigmoid, sigmoid of W [x_t, x_t-1] + b    (above the first layer: W x_t + b)
            c_t = f_t * c_t-1 + (1 - f_t) * z_t,   h_t = o_t * c_t

The input of the first layer and the output of the last are d_model wide, because the softmax may be tied. Between them
layers are d_inner wide. The state is a `Memory` of one position.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ...config.settings import Lengths, TransformerXLConfig
from ...mistake import Mistake
from ...ops.dropout import Dropout, dropout
from ..inference import check_state
from ..memory import Memory
from ..modules import Layers, RowLinear

States = tuple[Float[Tensor, "B 1 _"], ...]


class LSTMLayer(nn.Module):
    """An LSTM layer. `weight_drop` is dropout on the matrix from state to state, with one mask per call."""

    def __init__(self, inputs: int, width: int, *, weight_drop: float, first: bool):
        super().__init__()
        self.cell: nn.LSTM = nn.LSTM(inputs, width, batch_first=True)
        self.weight_drop = weight_drop
        self.state_widths: tuple[int, ...] = (width, width)
        self.columns = width

    def forward(self, x: Float[Tensor, "B T I"], states: States) -> tuple[Float[Tensor, "B T O"], States]:
        """The layer's output, and its h and c."""
        inward, recurrent, *biases = self.cell.parameters()
        weights = [inward, dropout(recurrent, self.weight_drop if self.training else 0.0), *biases]
        h, c = (state.to(recurrent.dtype).transpose(0, 1).contiguous() for state in states)
        with torch.autocast("cpu", enabled=False):  # many processors have no LSTM in bf16
            learns = self.training or torch.is_grad_enabled()  # otherwise cuDNN has no backward
            out, h, c = torch.lstm(x.to(h.dtype), (h, c), weights, True, 1, 0.0, learns, False, True)
        return out, (h.transpose(0, 1), c.transpose(0, 1))


class QRNNLayer(nn.Module):
    """A QRNN layer. `weight_drop` is dropout on its matrix. The first layer also reads the previous token."""

    def __init__(self, inputs: int, width: int, *, weight_drop: float, first: bool):
        super().__init__()
        self.linear: RowLinear = RowLinear(2 * inputs if first else inputs, 3 * width)
        self.weight_drop: float = weight_drop
        self.first: bool = first
        self.state_widths: tuple[int, ...] = (width, inputs) if first else (width,)
        self.columns: int = self.linear.in_features

    def forward(self, x: Float[Tensor, "B T I"], states: States) -> tuple[Float[Tensor, "B T O"], States]:
        """The layer's output; its c, and in the first layer its last input."""
        c, *last = states
        seen = torch.cat([x, torch.cat([last[0].to(x.dtype), x[:, :-1]], dim=1)], dim=-1) if self.first else x
        weight = dropout(self.linear.weight, self.weight_drop if self.training else 0.0)
        z, f, o = F.linear(seen, weight, self.linear.bias).to(c.dtype).chunk(3, dim=-1)
        f = f.sigmoid()
        c = recurrence(f, (1 - f) * z.tanh(), c)
        return (o.sigmoid() * c).to(x.dtype), (c[:, -1:], x[:, -1:]) if self.first else (c[:, -1:],)


def recurrence(f: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """s_t = f_t * s_t-1 + b_t for all t, from s_-1 = `start`, step by step. It divides nothing, so errors do not grow.

    On a CPU this is faster than a parallel scan, except for one row of hundreds of tokens.
    """
    s, states = start[:, 0], []
    for f_t, b_t in zip(f.unbind(1), b.unbind(1), strict=True):
        s = torch.addcmul(b_t, f_t, s)
        states.append(s)
    return torch.stack(states, dim=1)


class Recurrent(nn.Module):
    """A backbone without attention.

    A call uses only `mem_len` of its `Lengths`: with 0 each segment starts from zeros.
    """

    takes_padding = False
    layer_class: ClassVar[type[LSTMLayer | QRNNLayer]]

    def __init__(
        self, config: TransformerXLConfig, *, backend: str = "auto", recompute: bool = False, draw: bool = True
    ):
        super().__init__()
        if recompute:
            kind = config.kind
            raise Mistake(
                f"train.recompute must be false for kind = {kind}, which cannot recompute layers. Leave it out."
            )
        self.config: TransformerXLConfig = config
        widths = pairwise([config.d_model, *[config.d_inner] * (config.n_layer - 1), config.d_model])
        self.layers: Layers[LSTMLayer | QRNNLayer] = Layers(
            self.layer_class(*pair, weight_drop=config.weight_drop, first=i == 0) for i, pair in enumerate(widths)
        )
        dropout = config.dropout if config.dropout_input is None else config.dropout_input
        self.dropout: Dropout = Dropout(dropout, locked=config.locked_dropout)
        self.dropout_between: Dropout = Dropout(config.dropout, locked=config.locked_dropout)
        for name, weight in self.named_parameters() if draw else ():
            self.init_weight(name, weight)

    def init_weight(self, name: str, weight: Tensor) -> None:
        """Initialise as AWD-LSTM: U(-1 / sqrt(n), 1 / sqrt(n)) in a layer with n `columns`, U(-0.1, 0.1) elsewhere."""
        owners = (layer for layer in self.layers if any(weight is own for own in layer.parameters()))
        bound = next((layer.columns**-0.5 for layer in owners), 0.1)
        nn.init.uniform_(weight, -bound, bound)

    @property
    def state_widths(self) -> list[int]:
        """The widths of the states of all layers."""
        return [width for layer in self.layers for width in layer.state_widths]

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Memory | None,
        lengths: Lengths,
        begins: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[list[Float[Tensor, "B T _"]], Memory]:
        """The output of every layer, and the state for the next segment. Where a vector `begins` a document or episode,
        the row's states are zeros before it."""
        memory = self.empty_memory(len(x), lengths) if memory is None else memory
        check_state(memory, self.state_widths, x.to(torch.promote_types(x.dtype, torch.float32)))
        states = memory.layers
        if memory.valid is not None:
            states = tuple(state.masked_fill((memory.counts <= 0)[:, None, None], 0) for state in states)
        after: list[Tensor] = []
        outputs: list[Tensor] = []
        x = self.dropout(x)
        for layer in self.layers:
            own = states[len(after) : len(after) + len(layer.state_widths)]
            x, left = _read(layer, self.dropout_between(x) if outputs else x, own, begins)
            outputs.append(x)
            after += left
        kept = Memory(tuple(state.detach().to(old.dtype) for state, old in zip(after, memory.layers, strict=True)))
        return outputs, kept if lengths.mem_len else self.empty_memory(len(x), lengths)

    def empty_memory(self, batch: int, lengths: Lengths, valid: Int[Tensor, " B"] | None = None) -> Memory:
        """A memory of zeros."""
        if valid is not None:
            raise Mistake("A recurrent network takes no padding. Give rows of one length, and leave valid out.")
        weight = next(self.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return Memory(
            tuple(torch.zeros(batch, 1, width, dtype=dtype, device=weight.device) for width in self.state_widths)
        )

    def cached(self, memory: Memory, lengths: Lengths) -> Memory:
        """The memory itself: inference needs no other state."""
        return memory


def _read(
    layer: LSTMLayer | QRNNLayer, x: Float[Tensor, "B T I"], states: States, begins: Bool[Tensor, "B T"] | None
) -> tuple[Float[Tensor, "B T O"], States]:
    """A layer's output and states, with zeros before each vector that `begins`. `weight_drop` draws a mask for each
    piece between two beginnings in any row."""
    if not x.shape[1]:
        return x.new_zeros(len(x), 0, layer.state_widths[0]), states
    if begins is None:
        return layer(x, states)
    found = []
    cuts = [0, *(1 + begins[:, 1:].any(0).nonzero()[:, 0]).tolist(), x.shape[1]]
    for start, end in pairwise(cuts):
        states = tuple(state.masked_fill(begins[:, start, None, None], 0) for state in states)
        out, states = layer(x[:, start:end], states)
        found.append(out)
    return torch.cat(found, 1), states


class LSTM(Recurrent):
    """AWD-LSTM."""

    layer_class: ClassVar[type[LSTMLayer | QRNNLayer]] = LSTMLayer


class QRNN(Recurrent):
    """AWD-QRNN."""

    layer_class: ClassVar[type[LSTMLayer | QRNNLayer]] = QRNNLayer
