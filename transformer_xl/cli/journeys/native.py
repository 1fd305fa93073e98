"""Build the attention kernels for this CPU before a command uses them."""

from __future__ import annotations

import sys
from functools import partial

import torch

from ...ops import native, native_was_measured


def build_native(device: torch.device | None) -> None:
    """Build them once, where `auto` takes them. Lines go to standard error, because a result may be JSON."""
    if device is not None and device.type == "cpu" and native_was_measured():
        native.build(partial(print, file=sys.stderr, flush=True))
