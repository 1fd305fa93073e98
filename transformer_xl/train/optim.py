"""Optimizers by name, and learning rates as a pure function of the step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config.settings import TrainConfig
from ..runtime.device import card_has_bf16

NGRAM_TABLE = "ngrams.table.weight"


def build_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of a recipe, over all weights: for muon one for matrices and one for the others, otherwise one.
    One more is for the table of n-grams.

    Muon (Jordan et al. 2024) turns the momentum of a weight matrix into the nearest orthogonal one. It takes the
    matrices of the layers, with steps scaled to the size of Adam's (Liu et al. 2025, arXiv 2502.16982), so that `lr`
    means the same for both. Adam takes embeddings, softmax, norms and biases. The table of n-grams always has Adagrad
    (Duchi et al. 2011), which changes only the rows that a step reads: a rare row takes large steps, a frequent one
    smaller and smaller ones.
    """
    named = dict(model.named_parameters())
    table = named.pop(NGRAM_TABLE, None)
    optimizers: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        inside = [name for name, p in named.items() if p.ndim == 2 and name.startswith("backbone.layers.")]
        muon = Muon(
            [named.pop(name) for name in inside],
            config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        optimizers.append(muon)
    groups = _groups(named, config)
    if config.optimizer == "sgd":
        optimizers.append(torch.optim.SGD(groups, config.lr, config.momentum, weight_decay=config.weight_decay))
    else:
        adam = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
        decay = config.weight_decay
        optimizers.append(adam(groups, config.lr, config.betas, config.epsilon, weight_decay=decay, fused=True))
    if table is not None:
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default, but Adagrad warns unless it is chosen
        optimizers.append(torch.optim.Adagrad([{"params": [table], "ratio": config.ngram_lr_ratio}]))
    return optimizers


def _groups(named: Mapping[str, nn.Parameter], config: TrainConfig) -> list[dict[str, object]]:
    """One group, or two if the embedding's tables have a rate of their own."""
    groups: dict[float, list[nn.Parameter]] = {1.0: []}
    for name, p in named.items():
        ratio = config.embedding_lr_ratio if name.startswith("embedding.tables.") else 1.0
        groups.setdefault(ratio, []).append(p)
    return [{"params": weights, "ratio": ratio} for ratio, weights in groups.items() if weights]


def set_rates(optimizers: Iterable[torch.optim.Optimizer], step: int, config: TrainConfig, share: float = 1.0) -> None:
    """Set the learning rate of every group to the rate of this step, times `share`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config, group.get("ratio", 1.0)) * share


def learning_rate(step: int, config: TrainConfig, ratio: float = 1.0) -> float:
    """The rate of optimizer step `step`, counted from 0, for weights whose `lr` is `ratio` times the common one.

    The rate rises linearly to `lr` over `warmup_steps`. Then it is constant, or falls with 1 / sqrt(step), or falls to
    `min_lr_ratio` times the common `lr` at `max_steps`: along a half cosine that begins after warm-up, as in the
    original TensorFlow code, or along a line that begins at step 0, so the rate is below `lr` right after warm-up
    (Bergsma et al. 2025, arXiv 2502.15938). If weights are averaged, the schedule ends at `average_from`, and the rate
    stays at `average_lr_ratio` times its last value.
    """
    end = config.average_from or config.max_steps
    lr, low = config.lr * ratio, config.min_lr_ratio / ratio
    if config.average_from and step >= end:
        lr, step = config.average_lr_ratio * lr, end
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


class Muon(torch.optim.Muon):
    """Muon with all matrices of one shape in one batch: on a GPU a tenth of the kernels of `torch.optim.Muon`.

    It shares the state of PyTorch's optimizer, with Nesterov's momentum and the adjustment "match_rms_adamw".
    The products (https://kellerjordan.github.io/posts/muon/) are in bfloat16 where CUDA has it, or else in float32. On
    a CPU, where kernels cost nothing to start, and for the shards of FSDP2, whose products PyTorch knows, it is
    PyTorch's own step. A CPU for which oneDNN has no products in bfloat16 (without AVX-512) takes batches too, because
    there PyTorch's own step takes 50 times as long.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        weights = [p for group in self.param_groups for p in group["params"]]
        fast = _cpu_has_bf16_products()
        if closure is not None or any(isinstance(p, DTensor) or (p.is_cpu and fast) for p in weights):
            return super().step(closure)
        for group in self.param_groups:
            self.batched_step(group)
        return None

    def batched_step(self, group: dict[str, Any]) -> None:
        """One step of a group's matrices, shape by shape. A matrix and a transposed one of its size are one shape."""
        shapes: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for matrix in sorted(group["params"], key=_is_tall):
            if matrix.grad is not None:
                if not self.state[matrix]:
                    self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix.grad)
                shapes[tuple(sorted(matrix.shape))].append(matrix)
        for (_, longest), matrices in shapes.items():
            gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
            buffers = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])  # type: ignore[attr-defined]
            updates = torch._foreach_lerp(gradients, buffers, group["momentum"])  # type: ignore[attr-defined]
            wide = torch.stack([update.mT if _is_tall(update) else update for update in updates])
            wide = wide.bfloat16() if wide.is_cuda and card_has_bf16(wide.device) else wide
            wide = orthogonal(wide, group["ns_coefficients"], group["ns_steps"], group["eps"]).to(matrices[0].dtype)
            tall = sum(map(_is_tall, matrices))  # these are the last
            wide, turned = wide.split([len(wide) - tall, tall])
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])  # type: ignore[attr-defined]
            rate = group["lr"] * 0.2 * longest**0.5
            updates = [*wide.unbind(), *turned.mT.contiguous().unbind()]
            torch._foreach_add_(matrices, updates, alpha=-rate)  # type: ignore[attr-defined]


def _cpu_has_bf16_products() -> bool:
    # PyTorch for Apple's processors has no oneDNN, and so not the operator that is asked.
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def orthogonal(
    x: Float[Tensor, "N m n"], coefficients: tuple[float, float, float], steps: int, epsilon: float
) -> Float[Tensor, "N m n"]:
    """Matrices with the singular vectors of `x` and singular values near 1, by the iteration of Newton and Schulz."""
    a, b, c = coefficients
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=epsilon)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x
