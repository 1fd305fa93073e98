"""One model trained by many ranks: DDP, or FSDP2, with which each rank has a part of every weight."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ..runtime.ranks import Ranks


class Objective(nn.Module):
    """A model whose call is what is trained; `activity` asks for `regularised`."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, *call: Any, **activity: float) -> tuple[Tensor, Tensor, Any]:
        return self.model.regularised(*call, **activity) if activity else self.model.objective(*call)


def parallelise(model: Any, how: str, ranks: Ranks, *, compiled: bool = False) -> nn.Module:
    """`Objective` of `model`, whose gradients are then the mean of those of all ranks. With "fsdp" the model's own
    tensors become parts, and its calls gather them. `compiled` has torch.compile compile everything that is trained;
    "fsdp" does without.

    Raises:
        ValueError: the model's weights cannot be sharded among so many ranks.
    """
    objective = Objective(model)
    if compiled:
        if model.config.intermediate_losses:  # whenever the loss of a layer ends, the others are compiled anew
            import torch._dynamo.config as dynamo

            dynamo.recompile_limit += model.config.n_layer
        objective.compile()
    if ranks.size == 1:
        return objective
    if how == "ddp":
        # Else it deals gradients out to buckets anew in its second step, wherever that is: a sum of more than two ranks
        # then has another order, and a resumed run other bits. Where no parameter is unused, it would warn of that.
        objective.unused = nn.Parameter(next(model.parameters()).new_zeros(1))
        return nn.parallel.DistributedDataParallel(objective, find_unused_parameters=True, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    # A call's nll is a view that nobody writes into, which is what this warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.size,))
    for modules in model.shards():
        fully_shard(modules, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for call in ("objective", "regularised", "hidden", "log_probs"):
        register_fsdp_forward_method(model, call)
    return objective


def unsynchronised(objective: nn.Module) -> AbstractContextManager[None]:
    """Where gradients are added up on each rank alone, for more are to come."""
    return objective.no_sync() if isinstance(objective, nn.parallel.DistributedDataParallel) else nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which each rank has a part, gathered on every rank; any other as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def part_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a tensor that every rank has whole, the part that it has of `like`; the tensor itself where `like` is whole
    or of another shape."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
