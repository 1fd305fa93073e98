"""`txl env` and a run's `environment.json`: facts about this machine, and the choices for it with reasons."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ...config.settings import TrainConfig, TransformerXLConfig
from ...data.datasets import cache_folder
from ...mistake import Mistake
from ...ops import BACKENDS, resolve_backend
from ...runtime.device import CPUINFO
from ...runtime.files import below_home, plain_file
from ...runtime.terminal import show_pairs
from ...train import choices
from ..options.measure import Env

_PACKAGES = ("transformer-xl", "torch", "numpy", "safetensors")
_FEATURES = {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16"}
"""Processor features that affect speed, by their Linux names."""


def env(options: Env) -> None:
    """Print facts about this machine, and what `auto` chooses on it."""
    model = TransformerXLConfig(vocab_size=0)
    auto = choices(TrainConfig(), model)
    device = torch.device(auto["device"]["name"])
    dtype = torch.bfloat16 if auto["precision"]["name"] == "bf16" else torch.float32
    call = {"training": False, "scores": 0, "queries": TrainConfig().tgt_len}
    name, why = resolve_backend("auto", device, dtype, model.d_head, **call)
    auto["backend for inference"] = {"name": name, "why": why}
    facts = environment() | {"auto": auto, "cache": below_home(cache_folder())}
    if options.json:
        print(json.dumps(facts, indent=2))
        return
    shown = {name.replace("_", " "): _words(value) for name, value in facts.items() if name != "auto"}
    titles = {"backend": "backend at the default sizes"}
    chosen = {titles.get(name, name): f"{choice['name']}: {choice['why']}" for name, choice in auto.items()}
    show_pairs("this machine", shown)
    show_pairs("what would run with `auto`, and why", chosen)


def environment() -> dict[str, Any]:
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


def recorded_fact(run: Path, fact: str) -> Any:
    """A fact in a run's `environment.json`; "" if it is not recorded.

    `fact` is "recipe", "why", "init" or "corpus", with which the run began, or "launch", the processes that began it.

    Raises:
        Mistake: the file is damaged.
    """
    file = run / "environment.json"
    try:
        return json.loads(plain_file(file).read_text(encoding="utf-8")).get(fact, "") if file.exists() else ""
    except (ValueError, RecursionError, AttributeError) as error:
        raise Mistake(
            f"{file} is damaged ({error}); it records how the run began. Restore it, or remove it to compare nothing."
        ) from error


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
