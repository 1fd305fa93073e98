"""Several ranks train one model: with DDP, or with FSDP2, where each rank has a shard of every weight."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ..model.transformer_xl import TransformerXL
from ..runtime.ranks import Ranks
from .objective import Objective


def parallelise(objective: Objective, how: str, ranks: Ranks) -> nn.Module:
    """The objective to call; its gradients are then the mean over all ranks.

    With "fsdp" the model's tensors become shards, and its calls gather them.
    """
    if ranks.size == 1:
        return objective
    if how == "ddp":
        return replicate(objective)
    shard(objective.model, ranks.size)
    return objective


def replicate(objective: Objective) -> nn.Module:
    """The objective under DDP."""
    # Without an unused parameter DDP would warn, and it would assign gradients to buckets again in its second step.
    # Then sums over more than two ranks would change their order, and a resumed run its bits.
    objective.unused = nn.Parameter(next(objective.model.parameters()).new_zeros(1))
    return nn.parallel.DistributedDataParallel(objective, find_unused_parameters=True, gradient_as_bucket_view=True)


def shard(model: TransformerXL, ranks: int) -> None:
    """Make the model's tensors shards, one for each rank, under FSDP2."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    # FSDP2 warns because a call's nll is a view; nobody writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks,))
    for modules in _shards(model):
        fully_shard(modules, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for call in ("predict", "training_nll", "hidden", "log_probs"):
        register_fsdp_forward_method(model, call)


def _shards(model: TransformerXL) -> list[list[nn.Module]]:
    """Groups of modules whose weights are used in their own calls alone; the rest of the model is one more group."""
    layers = model.backbone.layers
    if model.config.share_position_projection:  # a layer's projections are used before its call
        return []
    positions = [layer.attention.position for layer in layers if hasattr(layer, "attention")]
    groups: list[list[nn.Module]] = [[layer] for layer in layers]
    return [own, *groups] if (own := [x for x in positions if x is not None]) else groups


def without_sync(objective: nn.Module) -> AbstractContextManager[None]:
    """A context in which each rank adds up gradients alone, because more chunks follow."""
    return objective.no_sync() if isinstance(objective, nn.parallel.DistributedDataParallel) else nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor, gathered on every rank; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_as(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, as `like` is sharded; the tensor itself if `like` is whole or has another
    shape."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
