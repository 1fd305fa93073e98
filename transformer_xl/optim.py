"""Optimizers by name, and learning rates as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from .settings import TrainConfig


def build_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimizers a recipe names, over all weights: one, but for muon.

    Muon (Jordan et al. 2024) turns the momentum of a weight matrix into the nearest orthogonal one. It takes the
    matrices of the layers, with steps scaled to the size of Adam's (Liu et al. 2025, arXiv 2502.16982), so that `lr`
    means the same for both; Adam takes embeddings, softmax, norms and biases.

    Raises:
        ValueError: this PyTorch has no Muon.
    """
    if config.optimizer == "muon":
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers.")]
        inside = {id(p) for p in matrices}
        return [_muon(matrices, config), _adam([p for p in model.parameters() if id(p) not in inside], config)]
    if config.optimizer == "sgd":
        weights = model.parameters()
        return [torch.optim.SGD(weights, config.lr, config.momentum, weight_decay=config.weight_decay)]
    return [_adam(model.parameters(), config)]


def _adam(parameters, config: TrainConfig) -> torch.optim.Optimizer:
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(
        parameters,
        config.lr,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _muon(parameters, config: TrainConfig) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        raise ValueError(
            f"train.optimizer must be adam, adamw or sgd with PyTorch {torch.__version__}, got muon. "
            "Update PyTorch to 2.9 or newer."
        )
    return kind(
        parameters,
        config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of optimizer step `step`, counted from 0.

    Linear up to `lr` over `warmup_steps`; then constant, a half cosine down to `min_lr_ratio * lr` at `max_steps`
    (over the steps after warm-up, as in the original TensorFlow code), or falling with 1 / sqrt(step) from `lr`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "cosine":
        done = (step - config.warmup_steps) / max(config.max_steps - config.warmup_steps, 1)
        low = config.min_lr_ratio
        return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))
    if config.schedule == "inv_sqrt":
        return config.lr * math.sqrt(max(config.warmup_steps, 1) / (step + 1))
    return config.lr
