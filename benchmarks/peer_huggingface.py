"""Hugging Face's TransfoXL (transformers 4.37.2), in fp32, because it fails under autocast.

It runs in its own environment, and imports nothing of `transformer_xl`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLLMHeadModel  # type: ignore[attr-defined]

State = list[Tensor]


class HuggingFace:
    """The model; it writes the random weights that the others read."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        torch.manual_seed(0)
        self.module = TransfoXLLMHeadModel(config(job))
        self.module.save_pretrained(job["weights"])
        self.module.crit.keep_order = True
        self.module.to(job["device"])

    def state(self, batch: int, length: int) -> State:
        shape = (length, batch, self.job["model"]["d_model"])
        return [torch.zeros(shape, device=self.job["device"]) for _ in range(self.job["model"]["n_layer"])]

    def score(self, ids: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        out = self.module.transformer(ids, mems=state)
        # The softmax drops the last position and the first label, so add one of each to score every target.
        pad = torch.nn.functional.pad
        nll = self.module.crit(pad(out.last_hidden_state, (0, 0, 0, 1)), pad(targets, (1, 0)))
        return nll.view_as(targets), out.mems

    def following(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        out = self.module(ids, mems=state)
        return out.prediction_scores[:, -1], out.mems


def config(job: dict[str, Any]) -> TransfoXLConfig:
    """Hugging Face's settings for one of our models."""
    model = job["model"]
    same = ("vocab_size", "n_layer", "n_head", "d_head", "d_model", "d_inner", "div_val", "untie_r", "pre_lnorm")
    same += ("layer_norm_epsilon", "dropout", "dropatt", "init_std", "proj_init_std", "cutoffs")
    return TransfoXLConfig(
        **{name: model[name] for name in same},
        d_embed=model["d_embed"] or model["d_model"],
        proj_share_all_but_first=any(model["tie_projs"]),
        mem_len=job["mem_len"],
        clamp_len=-1,
        same_length=False,
        adaptive=True,
    )
