"""Build the kernels for this CPU before a command uses them."""

from __future__ import annotations

import sys
from functools import partial

import torch

from ...ops import native, native_was_measured


def build_native(device: torch.device | None, *, needed: bool = False) -> None:
    """Build them once: on a CPU on which `auto` takes them in bf16, or on any if this command uses them (`needed`).

    Lines go to standard error, because a result may be JSON.
    """
    if device is not None and device.type == "cpu" and (needed or native_was_measured()):
        native.build(partial(print, file=sys.stderr, flush=True))
