"""The time of a call, and the peak memory of this process: PyTorch's count on a GPU, otherwise the kernel's.

torch is imported only when it is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def used_cuda() -> Any:
    """torch.cuda if this process has used it, otherwise None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def seconds_each(call: Callable[[], object], times: int) -> float:
    """Seconds of one of several calls, until the device has done its work."""
    if cuda := used_cuda():
        cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    if cuda := used_cuda():
        cuda.synchronize()
    return (time.perf_counter() - start) / times


def restart_peak(device: str = "cpu") -> int:
    """Restart the count of `peak_memory`, if the system can, and return the bytes in use now."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory(device: str = "cpu") -> int:
    """The largest number of bytes in use since `restart_peak`, or since the process started."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def first_step() -> None:
    """Take a step with one small weight. In its first step torch loads code, whose memory belongs to no model."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(8, 8))
    weight.square().sum().backward()
    torch.optim.Adam([weight], fused=True).step()


def _status(name: str) -> int:
    """Bytes that the kernel reports under `name`; without /proc, the peak since the process started."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would include the process that forked this one
        [line] = [line for line in status.read_text().splitlines() if line.startswith(f"{name}:")]
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
