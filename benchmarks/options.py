"""The options of `python -m benchmarks`, and the tables and JSON that all parts print."""

from __future__ import annotations

import json
import math
import platform
import sys
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from tyro.conf import Positional, arg

from transformer_xl.config.problems import Problems
from transformer_xl.config.recipe import load_recipe
from transformer_xl.config.settings import RunConfig
from transformer_xl.mistake import Mistake
from transformer_xl.runtime.device import resolve_device
from transformer_xl.runtime.terminal import show_table

from .bound import zipf_ids
from .race import Contender

_TOY = {"n_layer": 2, "n_head": 2, "d_head": 16, "d_model": 64, "d_inner": 64, "d_embed": None}
_INIT_STD = 1.1
"""In units of 1 / sqrt(d_model). This is more than at the start of training, so attention decides the losses."""
_ROWS, _TOKENS = 64, 8192
Part = Literal["train", "eval", "decode", "op", "kernels", "launches", "here", "all"]
_ALWAYS = ("size", "recipe", "device", "precision", "repeats")
TAKES = {
    "train": (*_ALWAYS, "peers", "against", "batch_size", "tgt_len", "mem_len"),
    "eval": (*_ALWAYS, "peers", "against", "batch_size", "tgt_len", "mem_len"),
    "decode": (*_ALWAYS, "peers", "against", "batch_size", "mem_len"),
    "op": (*_ALWAYS, "batch_size", "tgt_len", "mem_len"),
    "kernels": ("size",),
    "launches": ("recipe", "batch_size"),
    "here": ("recipe", "device", "precision", "seconds", "repeats"),
    "all": (*_ALWAYS, "peers"),
}
"""The options that each part uses."""


@dataclass(frozen=True)
class Options:
    """Compare the time of one part of the work with its peers and its bound. The last line is JSON."""

    part: Annotated[Positional[Part], arg(metavar="|".join(get_args(Part)))]
    """train: optimizer steps; eval: segments; decode: one token at a time; op: attention alone; kernels: the fused
    kernels compiled for GPUs, without one; launches: what a step and a token start on a GPU, counted without one; here:
    one recipe or run on this machine, without peers; all: everything but these three."""
    size: Literal["paper", "toy"] | None = None
    """toy: the same code at sizes that take seconds; by default paper. kernels: by default with all masks only; paper:
    with each choice of masks."""
    recipe: Annotated[str, arg(metavar="RECIPE")] = "enwik8-12l"
    """The recipe of the model. here: also a run folder or hf:NAME."""
    peers: Annotated[str | None, arg(metavar="PYTHON")] = None
    """The Python of an environment with torch, transformers 4.37.2 and, if wanted, x-transformers."""
    against: Annotated[Path | None, arg(metavar="CHECKOUT")] = None
    """Another checkout of this repository; its package takes part in the same race."""
    device: str = "auto"
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """The precision of this package and of the textbook form; by default both fp32 and bf16 are timed. here: by
    default that of the recipe or run."""
    batch_size: Annotated[int | None, arg(metavar="N")] = None
    tgt_len: Annotated[int | None, arg(metavar="N")] = None
    mem_len: Annotated[int | None, arg(metavar="N")] = None
    repeats: Annotated[int, arg(metavar="N")] = 5
    """Turns of each contender; medians are reported."""
    seconds: float = 1.0
    """here: minimum duration of one measurement."""

    def refuse(self) -> None:
        """Raises a Mistake if an option has no effect on the part, or is out of bounds."""
        takes = TAKES[self.part]
        for field in fields(self)[1:]:
            if getattr(self, field.name) != field.default and field.name not in takes:
                name, *known = (f"--{each.replace('_', '-')}" for each in (field.name, *takes))
                raise Mistake(f"{name} has no effect on {self.part}, which takes {', '.join(known)}. Leave it out.")
        problems = Problems()
        problems.bound(self, "batch_size", least=1, most=math.inf if self.part == "launches" else _ROWS)
        problems.bound(self, "tgt_len", "repeats", least=1)
        problems.bound(self, "mem_len", least=0)
        problems.bound(self, "seconds", above=0, most=3600)
        problems.refuse()
        if self.against and not (self.against / "benchmarks" / "worker.py").is_file():
            raise Mistake(f"--against must be a checkout of this repository with benchmarks/, got {self.against}.")

    @property
    def toy(self) -> bool:
        return self.size == "toy"

    @property
    def turn_seconds(self) -> float:
        return 0.01 if self.toy else 0.3

    @property
    def precisions(self) -> tuple[str, ...]:
        return (self.precision,) if self.precision else ("fp32", "bf16")

    @property
    def torch_device(self) -> str:
        return str(resolve_device(self.device))

    def config(self) -> RunConfig:
        """The settings of the recipe, with a small model for a toy."""
        config = load_recipe(self.recipe)
        if not config.model.vocab_size:
            raise Mistake(f"--recipe must be a recipe that sets vocab_size; {self.recipe} takes it from its corpus.")
        model = config.model
        if self.toy:
            cutoffs = tuple(100 * (band + 1) for band in range(len(model.cutoffs)))
            model = replace(model, **_TOY, vocab_size=min(model.vocab_size, 1000), cutoffs=cutoffs)
        return replace(config, model=replace(model, zero_memory=False, init_std=_INIT_STD * model.d_model**-0.5))

    def contenders(self) -> list[Contender]:
        """The language models, the reference first."""
        found = []
        if self.peers:
            precisions = ("fp32", "tf32") if self.torch_device.startswith("cuda") else ("fp32",)
            file, name = "benchmarks.peer_huggingface", "HuggingFace"
            found += [Contender("Hugging Face", precision, file, name, self.peers) for precision in precisions]
        each = [
            Contender("textbook", precision, "benchmarks.textbook", "Textbook")
            for precision in ("fp32", *self.precisions)
        ]
        found += dict.fromkeys(each)
        if self.peers:
            file, name = "benchmarks.peer_x_transformers", "XTransformers"
            found += [Contender("x-transformers", p, file, name, self.peers) for p in self.precisions]
        ours = [Contender("ours", p, "benchmarks.ours", "Ours") for p in self.precisions]
        if self.against:
            root = self.against.resolve()
            found += [contender._replace(label="ours, against", root=root) for contender in ours]
        return found + ours


def write_text(file: Path, vocab_size: int) -> None:
    """Write ids drawn by Zipf's law."""
    file.write_bytes(zipf_ids(vocab_size, _ROWS * _TOKENS).astype(np.int64).tobytes())


_ADAM = {"optimizer": "adam", "weight_decay": 0.0, "recompute": False, "compile": False}
"""The settings that all contenders share."""


def job(config: RunConfig, options: Options, folder: Path, part: str, **lengths: int) -> dict[str, Any]:
    """The job of a language model; `lengths` are batch, tgt_len and mem_len."""
    train = asdict(config.train) | {"tgt_len": lengths["tgt_len"], "mem_len": lengths["mem_len"]}
    train |= {"batch_size": lengths["batch"], "device": options.torch_device, "max_steps": 10**6}
    return {
        "part": part,
        "model": asdict(config.model),
        "train": train | {"clamp_len": None, "attn_len": None, "batch_chunk": 1} | _ADAM,
        "device": options.torch_device,
        "backend": "auto",
        "ids": str(folder / "ids"),
        "weights": str(folder / "weights"),
        "rows": _ROWS,
        **lengths,
    }


def hardware(device: str) -> dict[str, Any]:
    """The hardware and the versions."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    threads = torch.get_num_threads()
    return {"cpu": name, "gpu": gpu, "threads": threads, "torch": torch.__version__, "python": sys.version.split()[0]}


def header(part: str, options: Options) -> dict[str, Any]:
    """The first fields of the result of every part."""
    return {
        "date": date.today().isoformat(),
        "hardware": hardware(options.torch_device),
        **asdict(options) | {"part": part, "size": options.size or "paper"},
        "against": str(options.against or ""),
        "device": options.torch_device,
    }


def finish(result: dict[str, Any]) -> None:
    """Print the result as a line of JSON."""
    print(json.dumps(result), flush=True)


def show(title: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """Print a table; `columns` give each field a heading and a number format: "ms|.1f"."""
    cells = [[_written(row.get(name), spec.partition("|")[2]) for name, spec in columns.items()] for row in rows]
    show_table(title, [spec.partition("|")[0] for spec in columns.values()], cells)


def _written(value: Any, spec: str) -> str:
    return "" if value is None else format(value, spec)
