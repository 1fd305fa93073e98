"""Fixed rules that choose the device and the precision of a run."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..mistake import Mistake, join_words
from .launcher import rank_and_size

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The precisions of matrix products, and their dtypes."""
CPUINFO = Path("/proc/cpuinfo")
"""Only on Linux."""


def resolve_device(device: str) -> torch.device:
    """The device of this name. "auto" is the first CUDA device, otherwise Apple's GPU, otherwise the CPU; one of
    several ranks takes no GPU of Apple."""
    apple, cuda = torch.backends.mps.is_available(), range(torch.cuda.device_count())
    if device == "auto":
        other = "mps" if apple and rank_and_size()[1] == 1 else "cpu"
        return torch.device("cuda" if torch.cuda.is_available() else other)
    known = ["auto", "cpu", *["mps"] * apple, *["cuda"] * bool(cuda), *(f"cuda:{index}" for index in cuda)]
    if device not in known:
        raise Mistake(f"device must be {join_words(known, 'or')}: torch finds no other here, got {device!r}.")
    return torch.device(device)


def resolve_precision(precision: str, device: torch.device) -> tuple[str, str]:
    """The precision of matrix products, and the reason."""
    if precision != "auto":
        return precision, "as the settings say"
    if device.type == "cuda":
        fast = card_has_bf16(device)
        if not fast and torch.cuda.get_device_capability(device) >= (7, 0):
            return "fp16", "this CUDA device multiplies fp16 fast, and not bf16"
    else:
        fast = device.type == "cpu" and _cpu_has_fast_bf16()
    name = device.type.upper()
    return ("bf16", f"this {name} multiplies bf16 fast") if fast else ("fp32", f"this {name} has no fast bf16")


def card_has_bf16(device: torch.device) -> bool:
    """Whether this CUDA device multiplies bf16. PyTorch's `is_bf16_supported` is about the current device."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device. On CUDA the host does not wait for what it started there before, which needs
    pinned memory. Apple's GPU would read memory that is free (https://github.com/pytorch/pytorch/issues/189690)."""
    pinned = device.type == "cuda" and host.is_cpu
    return host.pin_memory().to(device, non_blocking=True) if pinned else host.to(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was started there, so that a clock shows its time."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def sums_on(device: torch.device) -> torch.device:
    """Where sums in float64 of this device's numbers are added: on the host for Apple's GPU, which has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def _cpu_has_fast_bf16() -> bool:
    """Whether bf16 is faster than fp32: with AMX, or with AVX-512's bf16 on a processor that is not Intel's.

    An Intel processor without AMX was slower in bf16 (experiments/LOG.md).
    """
    intel = CPUINFO.exists() and "GenuineIntel" in CPUINFO.read_text()
    return torch.cpu._is_amx_tile_supported() or (torch.cpu._is_avx512_bf16_supported() and not intel)


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """The context in which a model runs in a resolved precision."""
    if precision not in PRECISIONS:
        raise Mistake(f"precision must be fp32, bf16 or fp16, got {precision!r}.")
    return torch.autocast(device.type, dtype=PRECISIONS[precision], enabled=precision != "fp32")


if hasattr(os, "register_at_fork"):  # a forked process has none of OpenMP's threads, and would wait for them
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def prepare_process() -> None:
    """Make this process fast on a CPU. Call this before the first tensor is made.

    Numbers below 1.2e-38 become 0, in this thread and those that it starts. The attention of a trained model has many,
    and Intel's processors multiply them up to ten times as slowly as others.

    The memory of freed tensors is kept for the next ones, in large pages. By default glibc returns large blocks at
    once, so each training step takes a page fault for every page again. Without glibc this does nothing.
    """
    for kind in np.float32, np.float64:
        np.finfo(kind)  # NumPy before 2 keeps what it finds here, and warns of a smallest number that is 0
    torch.set_flush_denormal(True)
    if sys.platform != "linux":
        return
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # an option of PyTorch
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # -3 is M_MMAP_THRESHOLD, with a lower limit in older versions; -1 is M_TRIM_THRESHOLD, which does harm alone.
    if mallopt is not None and (mallopt(-3, 1 << 30) or mallopt(-3, 1 << 25)):
        mallopt(-1, (1 << 31) - 1)
