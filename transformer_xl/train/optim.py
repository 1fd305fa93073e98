"""Optimizers by name, and learning rates as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..config.settings import TrainConfig
from .muon import Muon

NGRAM_TABLE = "ngrams.table.weight"


def build_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimizers that a recipe names, over all weights: two for muon, one for the others, and one for n-grams.

    Muon (Jordan et al. 2024) turns the momentum of a weight matrix into the nearest orthogonal one. It takes the
    matrices of the layers, with steps scaled to the size of Adam's (Liu et al. 2025, arXiv 2502.16982), so that `lr`
    means the same for both. Adam takes embeddings, softmax, norms and biases. The table of n-grams always has Adagrad
    (Duchi et al. 2011), which changes only the rows that a step reads: a rare row takes large steps, a frequent one
    smaller and smaller ones.
    """
    named = dict(model.named_parameters())
    table = named.pop(NGRAM_TABLE, None)
    dense = _dense_optimizers(list(named.items()), config)
    if table is None:
        return dense
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, but Adagrad warns unless it is chosen
    return [*dense, torch.optim.Adagrad([{"params": [table], "ratio": config.ngram_lr_ratio}])]


def _dense_optimizers(named: list[tuple[str, nn.Parameter]], config: TrainConfig) -> list[torch.optim.Optimizer]:
    if config.optimizer == "muon":
        inside = [(name, p) for name, p in named if p.ndim == 2 and name.startswith("backbone.layers.")]
        outside = [(name, p) for name, p in named if p.ndim != 2 or not name.startswith("backbone.layers.")]
        muon = Muon(
            [p for _, p in inside],
            config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        return [muon, _adam(_groups(outside, config), config)]
    if config.optimizer == "sgd":
        groups = _groups(named, config)
        return [torch.optim.SGD(groups, config.lr, config.momentum, weight_decay=config.weight_decay)]
    return [_adam(_groups(named, config), config)]


def _groups(named: Iterable[tuple[str, nn.Parameter]], config: TrainConfig) -> list[dict[str, Any]]:
    """One group, or two if the embedding's tables have a rate of their own."""
    rates = [(config.embedding_lr_ratio if name.startswith("embedding.tables.") else 1.0, p) for name, p in named]
    ratios = dict.fromkeys([1.0, config.embedding_lr_ratio])
    groups = [{"params": [p for own, p in rates if own == ratio], "ratio": ratio} for ratio in ratios]
    return [group for group in groups if group["params"]]


def _adam(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(
        groups,
        config.lr,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def set_rates(optimizers: Iterable[torch.optim.Optimizer], step: int, config: TrainConfig, share: float = 1.0) -> None:
    """Set the learning rate of every group to the rate of this step, times `share`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config, group.get("ratio", 1.0)) * share


def learning_rate(step: int, config: TrainConfig, ratio: float = 1.0) -> float:
    """The rate of optimizer step `step`, counted from 0, for weights whose `lr` is `ratio` times the common one.

    The rate rises linearly to `lr` over `warmup_steps`. Then it is constant, or falls with 1 / sqrt(step), or falls to
    `min_lr_ratio` times the common `lr` at `max_steps`: along a half cosine (over the steps after warm-up, as in the
    original TensorFlow code), or along a line (Bergsma et al. 2025, arXiv 2502.15938). If weights are averaged, the
    schedule ends at `average_from`, and the rate stays at `average_lr_ratio` times its last value.
    """
    end = config.average_from or config.max_steps
    if config.average_from and step >= end:
        return config.average_lr_ratio * _scheduled_rate(end, end, config, ratio)
    return _scheduled_rate(step, end, config, ratio)


def _scheduled_rate(step: int, end: int, config: TrainConfig, ratio: float) -> float:
    lr, low = config.lr * ratio, config.min_lr_ratio / ratio
    if step < config.warmup_steps:
        return lr * (step + 1) / config.warmup_steps
    if config.schedule == "cosine":
        done = (step - config.warmup_steps) / max(end - config.warmup_steps, 1)
        return lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))
    if config.schedule == "linear":
        return lr * (low + (1 - low) * max(end - step, 0) / max(end, 1))
    if config.schedule == "inv_sqrt":
        return lr * math.sqrt(max(config.warmup_steps, 1) / (step + 1))
    return lr
