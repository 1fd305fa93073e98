"""The versions and hardware of this machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from ..ops import BACKENDS
from ..runtime.device import CPUINFO

_PACKAGES = ("transformer-xl", "torch", "numpy", "safetensors")
_FEATURES = {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16"}
"""Processor features that affect speed, by their Linux names."""


def environment() -> dict[str, object]:
    """Versions and hardware, without host name, user or environment variables."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores,
        "threads": torch.get_num_threads(),
        "cpu_features": sorted(_FEATURES & set(CPUINFO.read_text().split())) if CPUINFO.exists() else [],
        "cuda": torch.version.cuda,
        "devices": ["cpu", *(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))],
        "backends": list(BACKENDS),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
