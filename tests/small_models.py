"""Models small enough for exact laws: float64, eval mode, weights large enough that every influence shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_xl.config.settings import Lengths, TransformerXLConfig
from transformer_xl.config.shape import RECURRENT
from transformer_xl.model.baselines import build_model
from transformer_xl.model.memory import Memory
from transformer_xl.model.transformer_xl import TransformerXL, TransformerXLBackbone

VOCAB = 23
VARIANTS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"pre_lnorm": True},
    "pre-norm, final norm, own biases": {"pre_lnorm": True, "final_norm": True, "untie_r": True},
    "bands": {"cutoffs": (5, 11), "div_val": 2, "d_embed": 12, "tie_projs": (False, True, True), "untie_r": True},
    "projected": {"d_embed": 6, "cutoffs": (7,), "tie_projs": (True, False)},
    "QK-norm": {"qk_norm": True, "untie_r": True},
    "n-grams": {"ngrams": (2, 4), "ngram_rows": 997, "ngram_width": 6, "pre_lnorm": True},
    "matches": {"matches": (1, 2), "match_window": 5, "ngram_width": 6},
    "gated": {"gate": "gru", "gate_bias": 0.5, "relu_output": True, "pre_lnorm": True},
}
DOCUMENTS = VARIANTS["n-grams"] | {"document_end": 9}
"""Short texts of `text` have several ends."""
BASELINES: dict[str, dict[str, Any]] = {
    "shaw": {"kind": "shaw", "positions": 7},
    "vaswani": {"kind": "vaswani", "d_embed": 6, "cutoffs": (7,), "tie_projs": (True, False)},
    "al-rfou": {"kind": "al-rfou", "positions": 17},
}


def small_model(*, train: bool = False, dtype: torch.dtype = torch.float64, **changes: Any) -> TransformerXL:
    """A model of three layers whose sizes are all different."""
    torch.manual_seed(1)
    return build_model(small_config(**changes)).to(dtype).train(train)


def small_config(**changes: Any) -> TransformerXLConfig:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "n_layer": 3, "d_model": 14, "d_inner": 11, "proj_init_std": 0.3}
    if changes.get("kind") not in RECURRENT:  # which have no heads
        sizes |= {"n_head": 2, "d_head": 5, "init_std": 0.3}
    return TransformerXLConfig(**sizes | changes)


def small_backbone(*, train: bool = False, dtype: torch.dtype = torch.float64, **changes: Any) -> TransformerXLBackbone:
    """The layers of a small model, without a vocabulary."""
    torch.manual_seed(1)
    return TransformerXLBackbone(small_config(vocab_size=0, **changes)).to(dtype).train(train)


def vectors(batch: int, length: int, seed: int = 0) -> Tensor:
    """Inputs of a small backbone."""
    return torch.randn(batch, length, 14, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs_of(model: TransformerXL, ids: Tensor) -> Tensor:
    """The inputs of the first layer for a text that begins here."""
    x = model.embedding(ids)
    return x if model.ngrams is None else x + model.ngrams(ids, ids.shape[1])


def text(batch: int, length: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def lengths(mem_len: int, attn_len: int | None = None, clamp_len: int | None = None, tgt_len: int = 1) -> Lengths:
    return Lengths(tgt_len=tgt_len, mem_len=mem_len, attn_len=attn_len, clamp_len=clamp_len)


class Reading(NamedTuple):
    hidden: Tensor
    memory: Memory


def read(
    model: TransformerXL, ids: Tensor, lengths: Lengths, *, pieces: Sequence[int] | None = None, memory=None
) -> Reading:
    """Read ids in pieces of the given sizes (one piece by default)."""

    def call(piece: Tensor, state: Any) -> Any:
        return model.hidden(piece, state, lengths)

    return Reading(*_in_pieces(call, ids, pieces, memory))


def score(
    model: TransformerXL, ids: Tensor, lengths: Lengths, *, pieces: Sequence[int] | None = None, memory=None
) -> Tensor:
    """The losses of reading ids in pieces, ids standing for their own targets."""

    def call(piece: Tensor, state: Any) -> Any:
        return model(piece, piece, state, lengths)

    return _in_pieces(call, ids, pieces, memory)[0]


@torch.no_grad()
def _in_pieces(call: Any, ids: Tensor, pieces: Sequence[int] | None, state: Any) -> tuple[Tensor, Any]:
    found = []
    for piece in ids.split(list(pieces or [ids.shape[1]]), dim=1):
        out, state = call(piece, state)
        found.append(out)
    return torch.cat(found, 1), state


def used(memory: Memory) -> list[int]:
    """How many positions of each row count."""
    batch = memory.layers[0].shape[0]
    return [memory.length] * batch if memory.valid is None else memory.valid.tolist()


class Made(TorchDispatchMode):
    """Records every tensor that operations allocate: the operation and the number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and not x.is_meta and x.untyped_storage().data_ptr() not in given:
                self.all.append((str(func), x.numel()))
        return out

    def of(self, numel: int) -> list[str]:
        """The operations that made at least this many elements."""
        return [name for name, size in self.all if size >= numel]
