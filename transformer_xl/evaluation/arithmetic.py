"""What decides the bits of a computation on a CPU, so a decoder can see whether it will repeat the encoder's."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch

from ..ops import native, native_refusal
from ..runtime.device import CPUINFO


def arithmetic() -> dict[str, str]:
    """Versions, processor and kernel. Equal ones compute the same bits with the same number of threads."""
    kernel = native.library().stem if native_refusal(torch.device("cpu"), torch.float32) is None else "eager"
    versions = {name: version(name) for name in ("torch", "numpy", "constriction")}
    return {**versions, **_processor(), "kernel": kernel}


def _processor() -> dict[str, str]:
    """The processor's name, and a hash of its features."""
    capability = torch.backends.cpu.get_cpu_capability()
    if not CPUINFO.exists():
        return {"processor": platform.processor() or platform.machine(), "features": capability}
    facts = CPUINFO.read_text()
    name = re.search(r"^model name\s*: (.*)$", facts, re.MULTILINE)
    features = re.search(r"^(?:flags|Features)\s*: (.*)$", facts, re.MULTILINE)
    words = " ".join(sorted(features[1].split())) if features else ""
    digest = hashlib.sha256(f"{capability} {words}".encode()).hexdigest()[:16]
    return {"processor": name[1] if name else platform.machine(), "features": digest}


@contextmanager
def exact_arithmetic(threads: int) -> Iterator[None]:
    """Compute with this many threads, and only in ways that repeat bit by bit. Restores both settings."""
    filling: Any = torch.utils.deterministic
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False  # PyTorch would fill every new tensor, in order to show mistakes
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
        filling.fill_uninitialized_memory = before[2]
