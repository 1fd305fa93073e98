"""x-transformers in its nearest configuration, which is another model: a learned bias by distance and head (T5's)
replaces the relative encodings, so it has no position table and no shift. Norms follow the sublayers, and embedding and
softmax are tied, as in ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from x_transformers import Decoder, TransformerWrapper  # type: ignore[import-not-found]

State = list[Tensor] | None


class XTransformers:
    """The model."""

    def __init__(self, job: dict[str, Any]) -> None:
        model = job["model"]
        if model["cutoffs"]:
            raise NotImplementedError("x-transformers has no adaptive softmax")
        layers = Decoder(
            dim=model["d_model"],
            depth=model["n_layer"],
            heads=model["n_head"],
            attn_dim_head=model["d_head"],
            ff_mult=model["d_inner"] / model["d_model"],
            ff_custom_activation=torch.nn.ReLU(),
            pre_norm=model["pre_lnorm"],
            rel_pos_bias=True,
            attn_dropout=model["dropatt"],
            ff_dropout=model["dropout"],
            attn_sublayer_dropout=model["dropout"],
            ff_sublayer_dropout=model["dropout"],
        )
        self.module = TransformerWrapper(
            num_tokens=model["vocab_size"],
            max_seq_len=job["tgt_len"],
            max_mem_len=job["mem_len"],
            emb_dropout=model["dropout"],
            tie_embedding=True,
            use_abs_pos_emb=False,
            attn_layers=layers,
        ).to(job["device"])
        self.device = job["device"]

    def state(self, batch: int, length: int) -> State:
        _, state = self.module(torch.zeros(batch, 1, dtype=torch.long, device=self.device), return_mems=True)
        return [x.new_zeros(batch, length, x.shape[-1]) for x in state] if length else None

    def score(self, ids: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        logits, state = self.module(ids, mems=state, return_mems=True)
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return nll.view_as(targets), state

    def following(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        logits, state = self.module(ids, mems=state, return_mems=True)
        return logits[:, -1].float().log_softmax(-1), state
