"""Fixed rules that choose the device and the precision of a run."""

from __future__ import annotations

import ctypes
import os
import re
import sys

import torch

from ..mistake import Mistake

PRECISIONS = ("fp32", "bf16")


def resolve_device(device: str) -> torch.device:
    """The CPU or CUDA device of this name. "auto" is CUDA if there is a CUDA device."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    named, count = re.fullmatch(r"cpu|cuda(?::(\d{1,9}))?", device, re.ASCII), torch.cuda.device_count()
    if named is None:
        raise Mistake(f"device must be auto, cpu, cuda or cuda:N, got {device!r}.")
    if device != "cpu" and not count:
        raise Mistake(f"device must be auto or cpu: torch finds no CUDA device here, got {device!r}.")
    if named[1] and int(named[1]) >= count:
        raise Mistake(f"device must be auto, cpu, cuda, or cuda:N with N below {count}, got {device!r}.")
    return torch.device(device)


def resolve_precision(precision: str, device: torch.device) -> tuple[str, str]:
    """The precision of matrix products, and the reason; weights, norms, losses and sums are always float32."""
    if precision != "auto":
        if precision not in PRECISIONS:
            raise Mistake(f"precision must be auto, fp32 or bf16, got {precision!r}.")
        return precision, "asked for by name"
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return ("bf16", f"this {device.type} multiplies bf16") if fast else ("fp32", f"this {device.type} has no fast bf16")


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """The context in which a model runs in a resolved precision."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def reuse_memory() -> None:
    """Keep the memory of freed tensors in this process for the next ones, and use large pages.

    By default glibc returns large blocks at once, so each training step takes a page fault for every page again.
    Call this before the first tensor is made. Without glibc it does nothing.
    """
    if sys.platform != "linux":
        return
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # an option of PyTorch
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # -3 is M_MMAP_THRESHOLD, with a lower limit in older versions; -1 is M_TRIM_THRESHOLD, which does harm alone.
    if mallopt is not None and (mallopt(-3, 1 << 30) or mallopt(-3, 1 << 25)):
        mallopt(-1, (1 << 31) - 1)
