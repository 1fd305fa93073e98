"""The backends of relative attention, and which of them serves a call, and why.

reference   the equation, written out; every other backend is compared with it
strided     PyTorch, all scores kept: training with few scores, and transforms of torch.func
chunked     PyTorch, scores computed twice: training with many scores
sdpa        PyTorch's fused attention with the position term as its mask: without gradients
triton      fused kernels for a CUDA device; where they passed their contract, `auto` takes them for training and, in
            half precision, for 64 queries or more
native      kernels in C++ for a CPU with AVX2 or AVX-512, once they are built
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..mistake import Mistake
from . import chunked, reference, sdpa, strided
from .call import NO_TRANSFORM, Call, constant, in_transform, product_dtype

STRIDED_SCORES = 1 << 22
"""Training on a CPU keeps all scores of a call, B H T S, up to this number. There, computing them twice takes 1.3 times
as long. With twice as many scores or more it takes 0.6 to 0.8 times as long, because the system allocates tensors of
that size anew in each call.
"""


def check_backend(backend: str) -> str:
    """The name, or a `Mistake` if there is no such backend."""
    if backend != "auto" and backend not in BACKENDS:
        raise Mistake(f"backend must be auto or one of {', '.join(BACKENDS)}, got {backend!r}.")
    return backend


def resolve_backend(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    *,
    training: bool,
    scores: int,
    queries: int = 1,
) -> tuple[str, str]:
    """The backend that serves a call, and why.

    Args:
        training: whether gradients are needed.
        scores: B H T S of all rows of a call.
        queries: T.

    Raises:
        ValueError: there is no such backend.
    """
    if check_backend(backend) != "auto":
        return backend, "as the settings say"
    if device.type == "cuda" and (training or (queries >= 64 and dtype.itemsize == 2)):
        reason = triton_refusal(device, dtype, head_size)
        why = f"the fused kernel cannot serve: {reason}" if reason else doubt(device)
        if why is None:
            return "triton", "the fused kernel, which passed its contract on this card"
        if training:
            return "strided", why
    many = training and scores > STRIDED_SCORES
    note = ""
    if device.type == "cpu" and native_wins(dtype, head_size, queries, training=training, many=many):
        reason = native_refusal(device, dtype)
        if reason is None:
            return "native", "the kernels in C++ for this processor"
        note = f" (native cannot serve: {reason})"
    if not training:
        return "sdpa", f"without gradients PyTorch's fused attention takes the position term as its mask{note}"
    if many:
        return "chunked", f"more than {STRIDED_SCORES:,} scores per layer are computed twice and never all kept{note}"
    return "strided", f"up to {STRIDED_SCORES:,} scores per layer are all kept{note}"


@constant  # torch.compile would stop at the import
def native_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels in C++ cannot serve a call; None if they can."""
    try:
        return import_module(".native", __package__).refusal(device, dtype)
    except ImportError:
        return "the folder ops/native is missing"


@constant  # torch.compile would stop at the import
def triton_refusal(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why the fused kernel cannot serve a call; None if it can."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it runs on a CUDA device, got {device}"
    try:
        kernels = import_module(".triton", __package__)
    except ImportError:
        return "triton is not installed (pip install triton)"
    if dtype not in kernels.DTYPES or head_size > kernels.MAX_HEAD_SIZE:
        kind = str(dtype).removeprefix("torch.")
        return f"it takes fp32, bf16 or fp16 and heads of at most {kernels.MAX_HEAD_SIZE}, got {kind} and {head_size}"
    on_card = device.type == "cuda" and torch.cuda.is_available()
    if dtype.itemsize == 2 and on_card and torch.cuda.get_device_capability(device) < (8, 0):
        return "in half precision it needs a card of compute capability 8.0"  # a T4 has too little shared memory
    return None


def fused_sublayer(backend: str, like: Tensor, head_size: int) -> Any:
    """The kernels of a sublayer for products with `like`, if attention with this backend has kernels too; else None."""
    if triton_refusal(like.device, product_dtype(like), head_size) is not None:
        return None
    passed = backend == "triton" or (backend == "auto" and like.is_cuda and doubt(like.device) is None)
    return import_module(".fused_sublayer", __package__) if passed else None


def cache_folder() -> Path:
    """The folder of `transformer_xl.data.datasets.cache_folder` on Linux."""
    home, caches = os.environ.get("TXL_HOME"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home or Path(caches, "txl")).expanduser()


def card(device: torch.device) -> dict[str, str | None]:
    """The GPU, versions and source that a verdict of `txl env --check` holds for; if one changes, check again."""
    kernels = import_module(".triton", __package__)  # not installed everywhere
    properties = torch.cuda.get_device_properties(device)
    return {
        "card": properties.name,
        "target": f"sm_{properties.major}{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": kernels.triton.__version__,
        "source": hashlib.sha256(kernels.SOURCES).hexdigest(),
    }


def verdict_file(facts: dict[str, str | None]) -> Path:
    """Where `txl env --check` keeps whether the fused kernels passed on this card."""
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "verdicts" / f"{key}.json"


@constant  # torch.compile would stop at the file
def doubt(device: torch.device) -> str | None:
    """Why `auto` neither trains nor decodes with the fused kernels on this card; None if they passed."""
    return read_verdict(device)


@cache
def read_verdict(device: torch.device) -> str | None:
    """The result of `doubt`, cached for the process. After a new check, call `read_verdict.cache_clear`."""
    file, again = verdict_file(card(device)), "`txl env --check` tries them in one or two minutes"
    if not file.exists():
        return f"the fused kernels have not been tried on this card with these versions; {again}"
    why = json.loads(file.read_text(encoding="utf-8"))["why"]
    return None if why is None else f"the fused kernels failed their contract on this card ({why}); {again}"


def build_native(device: torch.device | None) -> None:
    """Build the kernels for this CPU, once. Lines go to standard error, because a result may be JSON."""
    if device is not None and device.type == "cpu":
        import_module(".native", __package__).build(partial(print, file=sys.stderr, flush=True))


def native_wins(dtype: torch.dtype, head_size: int, queries: int, *, training: bool, many: bool) -> bool:
    """Whether the native kernels were mostly at least 1.2 times as fast as the other backends, where this was measured.

    With AVX2 it is at least 1.15 times. Blocks are multiples of 32 queries, and heads are padded to a multiple of 32
    (AVX2: 16). `many`: more than `STRIDED_SCORES`.
    """
    whole, amx = head_size % 32 == 0, _has_amx()
    if dtype != torch.bfloat16:
        least = 128 if not training else 512 if many else math.inf
        return whole and queries >= least
    if not training:
        return queries >= 16
    least = 64 if many else 128 if amx else 512
    return queries >= least and (whole or (many and amx))


@constant  # torch.compile would stop here
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


def _triton(call: Call) -> Tensor:
    reason = triton_refusal(call.q.device, call.q.dtype, call.q.shape[-1])
    if reason is not None:
        raise Mistake(f"backend triton cannot serve this call: {reason}. Use auto, strided or sdpa.")
    return sys.modules[f"{__package__}.triton"].attend(call)


def _native(call: Call) -> Tensor:
    reason = NO_TRANSFORM if in_transform() else native_refusal(call.q.device, call.q.dtype)
    if reason is not None:
        raise Mistake(f"backend native cannot serve this call: {reason}. Use auto or strided.")
    return sys.modules[f"{__package__}.native"].attend(call)


BACKENDS: dict[str, Callable[[Call], Tensor]] = {
    "reference": reference.attend,
    "strided": strided.attend,
    "chunked": chunked.attend,
    "sdpa": sdpa.attend,
    "triton": _triton,
    "native": _native,
}
