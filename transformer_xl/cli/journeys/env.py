"""`txl env` and a run's `environment.json`: facts about this machine, and the choices for it with reasons."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ...config.settings import TrainConfig, TransformerXLConfig
from ...data.datasets import cache_folder
from ...mistake import Mistake
from ...ops import BACKENDS, resolve_backend, testing, triton_refusal, verdict
from ...runtime.device import CPUINFO, resolve_device
from ...runtime.files import below_home, make_folder, plain_file, write_whole
from ...runtime.terminal import show_pairs
from ...train import choices
from ..options.measure import Env

_PACKAGES = ("transformer-xl", "torch", "numpy", "safetensors")
_FEATURES = {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16"}
"""Processor features that affect speed, by their Linux names."""


def env(options: Env) -> None:
    """Print facts about this machine, and what `auto` chooses on it."""
    if options.check:
        check_card()
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


def check_card() -> None:
    """Run the contract of the fused kernels on the CUDA device, and keep the verdict for `auto`.

    Raises:
        Mistake: there is no CUDA device, or the kernels cannot run on it.
    """
    device = resolve_device("auto")
    refusal = triton_refusal(device, torch.float32, 64)
    if refusal:
        raise Mistake(f"--check needs a CUDA device and Triton: {refusal}. Leave --check out on this machine.")
    facts, start = verdict.card(device), time.monotonic()
    print(f"Comparing the fused kernels with float64 on {facts['card']} ...", file=sys.stderr, flush=True)
    why = testing.fault_of("triton", str(device))
    found = {"why": why, "date": date.today().isoformat(), "seconds": round(time.monotonic() - start, 1)}
    file = verdict.file_of(facts)
    make_folder(file.parent)
    write_whole(file, json.dumps(facts | found, indent=2) + "\n")
    verdict.read.cache_clear()
    ended = "They passed" if why is None else f"They failed ({why})"
    print(f"{ended}, after {found['seconds']:.0f} s. Kept in {below_home(file)}.", file=sys.stderr)


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
