"""Build the kernels for this CPU before a command uses them."""

from __future__ import annotations

import sys
from functools import partial

import torch

from ...ops import native, native_was_measured


def build_native(device: torch.device | None, *, step: bool = False) -> None:
    """Build them once, where `auto` takes those of attention, or for a command that reads token by token (`step`).

    Lines go to standard error, because a result may be JSON.
    """
    if device is not None and device.type == "cpu" and (step or native_was_measured()):
        native.build(partial(print, file=sys.stderr, flush=True))
