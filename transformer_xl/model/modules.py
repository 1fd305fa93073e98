"""Shapes that many modules name and checks of a call's tensors; a linear layer that is faster on a CPU.

The checks read no values, so the host never waits for a device, and torch.compile sees no branch on data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from ..mistake import Mistake
from ..ops.call import in_autocast, product_dtype

Ids = Integer[Tensor, "B T"]
Vectors = Float[Tensor, "B T D"]
Queries = Float[Tensor, "B H T K"]
Keys = Float[Tensor, "B H S K"]
"""Keys or values of memory and segment."""
Past = Float[Tensor, "B M D"] | Callable[[Queries, Queries], tuple[Keys, Keys]]
"""What a layer knows of the past: its earlier inputs; or a function that stores the segment's keys and values, and
returns those of past and segment."""
Valid = Int[Tensor, " B"] | None
"""Positions of memory that count in each row; None: all. See `Memory`."""
Layer = TypeVar("Layer", bound=nn.Module)

ROWS = 16
"""In bfloat16 on a CPU the rows of a product above this number are padded to a multiple of it."""


def as_ids(ids: Integer[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Ids as int64, which embeddings need. A vocabulary's `encode` returns the smallest dtype that holds them."""
    return _as_int64(ids, ids.ndim == 2, "ids must have the shape [rows, positions]")


def as_targets(targets: Integer[Tensor, "*B"], shape: Sequence[int]) -> Int[Tensor, "*B"]:
    """Targets as int64; `shape` is the shape of the ids."""
    return _as_int64(targets, targets.shape == tuple(shape), f"targets must have the shape of ids, {list(shape)},")


def check_vectors(x: Tensor, like: Float[Tensor, " D"]) -> None:
    """Raise a `Mistake` unless `x` is vectors for a backbone with the weight `like`. Autocast converts the dtype."""
    fits = x.ndim == 3 and x.shape[2] == len(like) and x.device == like.device
    is_cast = x.is_floating_point() and in_autocast(like)
    if not fits or (x.dtype != like.dtype and not is_cast):
        raise Mistake(
            f"x must be vectors of the shape [rows, positions, {len(like)}], {like.dtype} on {like.device}, got "
            f"{list(x.shape)} {x.dtype} on {x.device}. Project vectors of another width, and embed ids."
        )


def as_marks(rows: Bool[Tensor, " B"], like: Tensor) -> Bool[Tensor, " B"]:
    """Marks of rows as booleans on the device of `like`, which has a row for each; also from lists and arrays."""
    marks = torch.as_tensor(rows, device=like.device)
    if marks.dtype != torch.bool or marks.shape != like.shape[:1]:
        raise Mistake(
            f"rows must be true or false for each of {len(like)} rows, got {list(marks.shape)} {marks.dtype}. "
            "Numbers of rows are no marks."
        )
    return marks


def _as_int64(x: Tensor, fits: bool, rule: str) -> Tensor:
    if not fits or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise Mistake(f"{rule} and an integer dtype, got {list(x.shape)} and {x.dtype}.")
    return x.long()


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than the `forward` of its class."""
    own = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return any(own) or "forward" in vars(module)


def is_plain(module: nn.Module, kind: type[Layer]) -> TypeGuard[Layer]:
    """Whether a call of the module does just what this class does."""
    return type(module) is kind and not has_hooks(module)


class Rounded(NamedTuple):
    """A linear layer's weight and bias in the dtype of products."""

    weight: Tensor
    bias: Tensor | None
    tail: Tensor | None
    """The weight's rows from `RowLinear.tail` on, if that is not 0."""
    exact: tuple[Tensor, Tensor | None]
    """What they were rounded from."""
    versions: list[int]
    unseen: bool
    """Whether nobody gets the outputs of layers during the step, so a product may read the rounded output, and
    the gradient of the output itself lacks the product's part."""

    def fits(self, linear: nn.Linear, x: Tensor) -> bool:
        """Whether autocast would round the layer's weights to these for a product with `x`."""
        same = self.exact[0] is linear.weight and self.exact[1] is linear.bias
        written = not torch.compiler.is_compiling() and self.versions != versions(linear)
        return same and not written and self.weight.dtype == product_dtype(x)


def weights_of(linear: nn.Linear) -> list[Tensor]:
    """Its weight, and its bias if it has one."""
    return [linear.weight] if linear.bias is None else [linear.weight, linear.bias]


def versions(linear: nn.Linear) -> list[int]:
    """PyTorch's counts of what wrote into each weight."""
    return [weight._version for weight in weights_of(linear)]


class RowLinear(nn.Linear):
    """PyTorch's linear layer, with other products in bfloat16 on a CPU.

    For a single row PyTorch's matrix-vector product is faster than its matrix product. For each other number of rows
    oneDNN makes a kernel (1 ms) and keeps it (0.7 MB). Texts have any length, so without gradients the input is padded
    to a multiple of `ROWS`.
    """

    rounded: Rounded | None = None
    """What products use during a step of training in half precision; see `rounded_weights`."""
    tail: int = 0
    """The first of the weight's rows that products also read alone; 0: they read none alone."""

    def used(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weight and bias of a product with `x`."""
        rounded = self.rounded
        return rounded[:2] if rounded is not None and rounded.fits(self, x) else (self.weight, self.bias)

    def used_from(self, row: int, x: Tensor) -> Tensor:
        """The weight's rows from this one on, in a product with `x`."""
        rounded = self.rounded
        own = rounded.tail if rounded is not None and row == self.tail and rounded.fits(self, x) else None
        return self.used(x)[0][row:] if own is None else own

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"rounded": None}  # nobody may copy what has a gradient

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        if self.rounded is not None:
            weight, bias = self.used(x)
            half = None if torch.compiler.is_compiling() else vars(x).get("rounded")  # of a fused sublayer
            return F.linear(x if half is None or half.dtype != weight.dtype else half, weight, bias)
        weight, rows = self.weight, x.numel() // self.in_features
        if not weight.is_cpu or weight.dtype != torch.bfloat16 or torch.compiler.is_compiling():
            return super().forward(x)
        if rows == 1 and (x.dtype == weight.dtype or torch.is_autocast_enabled("cpu")):
            row = x.reshape(-1).to(weight.dtype)
            out = torch.mv(weight, row) if self.bias is None else torch.addmv(self.bias, weight, row)
            return out.view(*x.shape[:-1], -1)
        if rows < ROWS or rows % ROWS == 0 or torch.is_grad_enabled():
            return super().forward(x)
        padded = F.pad(x.reshape(rows, -1), (0, 0, 0, -rows % ROWS))
        return super().forward(padded)[:rows].view(*x.shape[:-1], -1)


class SharedWeights(nn.Module):
    """A module that keeps weights shared where PyTorch makes a weight for each name."""

    def _tied(self) -> list[list[str]]:
        """The names of each weight that has several."""
        names: dict[int, list[str]] = {}
        for name, weight in self.named_parameters(remove_duplicate=False):
            names.setdefault(id(weight), []).append(name)
        return [each for each in names.values() if len(each) > 1]

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        """Some changes, such as `to_empty`, make PyTorch create a weight for each name: then share them again."""
        tied = self._tied()
        super()._apply(fn, recurse)
        for first, *others in tied:
            for owner, _, name in (other.rpartition(".") for other in others):
                setattr(self.get_submodule(owner), name, self.get_parameter(first))
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        """With `assign=True` PyTorch makes a weight for each name, unless it gets the same weight for all. Here all
        get the last one given, which is also what remains without `assign`."""
        for names in self._tied() if metadata.get("assign_to_params_buffers") else ():
            keys = [prefix + name for name in names]
            given = [key for key in keys if key in state_dict]
            if given:
                weight = nn.Parameter(state_dict[given[-1]], requires_grad=False)  # PyTorch marks it as the old one
                state_dict.update(dict.fromkeys(keys, weight))
                missing += [key for key in keys if key not in given]
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)


class Layers(nn.ModuleList, Generic[Layer]):
    """PyTorch's list of modules. Type checkers know what is in it."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Layer]: ...
