"""The facts in a run's folder: the settings, how and on what machine it began, and the first lines of its log.

runs/NAME/  config.toml · environment.json · log.txt
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import latest
from ..config.recipe import write_toml
from ..config.settings import RunConfig
from ..data.corpus import Corpus
from ..mistake import Mistake
from ..model.transformer_xl import TransformerXL
from ..ops import BACKENDS
from ..runtime.device import CPUINFO
from ..runtime.files import explain_write_error, plain_file, write_whole
from ..runtime.ranks import Ranks, launch_id

_PACKAGES = ("transformer-xl", "torch", "numpy", "safetensors")
_FEATURES = {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16"}
"""Processor features that affect speed, by their Linux names."""
BEGUN = ("recipe", "why", "init", "chosen")
"""What `environment.json` says of how a run began: its recipe, why this one, the run whose weights it started from, and
the choices for settings that were "auto"."""


def write_facts(
    run: Path, model: TransformerXL, corpus: Corpus, config: RunConfig, ranks: Ranks, begun: Mapping[str, Any] | None
) -> None:
    """Write the facts of a run that begins or goes on, and print the lines about it.

    `begun` has the facts `BEGUN`; None: those that the folder records.
    """
    last = latest(run)
    if begun is None:
        begun = {fact: recorded_fact(run, fact) if last else "" for fact in BEGUN}
    facts = environment() | {"ranks": ranks.size, "launch": launch_id()} | dict(begun)
    facts["corpus"] = {name: split.sha256 for name, split in corpus.header.splits.items()}
    write_whole(run / "environment.json", json.dumps(facts, indent=2) + "\n")  # first: it identifies the run
    write_whole(run / "config.toml", write_toml(config))
    about = [f"{describe(model, corpus, config, ranks)}; {run}", "" if last else begun["why"], *corpus.notes]
    for line in filter(None, about):  # reports search for the first line
        say(run, line)
    if last is None:
        return
    step, most = int(last.name.removeprefix("step_")), config.train.max_steps
    ended = f" All {most:,} steps are done; a higher train.max_steps goes on." if step >= most else ""
    say(run, f"Resumed from step {step:,} of {most:,} ({last.name}).{ended}")


def describe(model: TransformerXL, corpus: Corpus, config: RunConfig, ranks: Ranks) -> str:
    """One line about the model, the text, the lengths and the machine."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    train, scored, split = config.train, config.eval_lengths, corpus.header.splits["train"]
    unknown = f" ({split.unknown:,} unknown)" if split.unknown else ""
    together = f", {ranks.size} ranks by {train.parallel}" if ranks.size > 1 else ""
    return (
        f"{parameters / 1e6:.2f}M parameters on {corpus.name}, {split.tokens:,} tokens{unknown}, "
        f"{corpus.vocab}; segments of {train.tgt_len:,} after {train.mem_len:,}, scored "
        f"{scored.tgt_len:,} after {scored.mem_len:,}; {train.device}, {train.precision}, {train.backend}{together}"
    )


def say(run: Path, line: str) -> None:
    """Print a line and append it to the run's log."""
    print(line, flush=True)
    with explain_write_error(run / "log.txt"), (run / "log.txt").open("a", encoding="utf-8") as log:
        log.write(line + "\n")


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

    `fact` is one of `BEGUN`, "corpus", or "launch", the processes that began it.

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
