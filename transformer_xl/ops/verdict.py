"""Whether the fused kernels passed their contract on this card.

`txl env --check` finds out and keeps the verdict in the cache folder. `auto` trains with the kernels only after that.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from importlib import import_module
from pathlib import Path

import torch


def cache_folder() -> Path:
    """The folder of `transformer_xl.data.datasets.cache_folder`."""
    home, caches = os.environ.get("TXL_HOME"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home or Path(caches, "txl")).expanduser()


def card(device: torch.device) -> dict[str, str | None]:
    """What a verdict is about: the card, the versions and the kernels' source. Another of these needs another check."""
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


def file_of(facts: dict[str, str | None]) -> Path:
    """The file of the verdict about these facts."""
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "verdicts" / f"{key}.json"


@torch.compiler.assume_constant_result  # torch.compile would stop at the file
def doubt(device: torch.device) -> str | None:
    """Why `auto` does not train with the fused kernels on this card; None if they passed."""
    return read(device)


@cache
def read(device: torch.device) -> str | None:
    """`doubt`, read once in a process. After another check call `read.cache_clear`."""
    file, again = file_of(card(device)), "`txl env --check` tries them in one or two minutes"
    try:
        why = json.loads(file.read_text(encoding="utf-8"))["why"]
    except FileNotFoundError:
        return f"the fused kernels have not been tried on this card with these versions; {again}"
    return None if why is None else f"the fused kernels failed their contract on this card ({why}); {again}"
