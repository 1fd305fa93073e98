"""`Run`: the folder of a run, as training writes it and as everything else reads it."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open

from ..config.recipe import load_recipe, write_toml
from ..config.settings import RunConfig
from ..data.corpus import Corpus
from ..mistake import Mistake, join_words, printable
from ..ops import BACKENDS
from ..runtime import files
from ..runtime.device import CPUINFO
from ..runtime.ranks import launch_id
from .metrics import Metrics
from .parts import FILES, FILES_TO_READ, name_damage, read_header

BEGUN = ("recipe", "why", "init", "chosen")
"""What `environment.json` says of how a run began; `chosen` has the choices for settings that were "auto"."""

_FEATURES = {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16"}
"""Processor features that affect speed, by their Linux names."""


class Run:
    """The folder of a run.

    runs/NAME/
        config.toml       every setting
        environment.json  versions, hardware, the checksums of the text, and how the run began
        log.txt           the lines that training printed
        metrics.jsonl     losses, speeds, scores and samples, for programs
        checkpoints/      step_00004000/ and so on
        report.html       the page; report.json has the figures on it that need the model
    """

    def __init__(self, path: str | Path):
        self.path: Path = Path(path)

    @classmethod
    def of(cls, folder: Path) -> Run:
        """The run at `folder`, or the run of the checkpoint at `folder`."""
        return cls(folder.parent.parent if folder.parent.name == "checkpoints" else folder)

    @property
    def metrics(self) -> Metrics:
        return Metrics(self.path / "metrics.jsonl")

    def exists(self) -> bool:
        """Whether training has written anything here."""
        return any((self.path / name).exists() for name in ("config.toml", "metrics.jsonl", "checkpoints"))

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint after `step` steps."""
        return self.path / "checkpoints" / f"step_{step:08d}"

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        found = self.path.glob("checkpoints/*")
        names = [(re.fullmatch(r"step_(\d+)", path.name), path) for path in found if not path.is_symlink()]
        steps = [(int(match[1]), path) for match, path in names if match]
        return [path for _, path in sorted(steps)]

    @property
    def latest(self) -> Path | None:
        """The last checkpoint; None if there is none."""
        return next(reversed(self.checkpoints()), None)

    @property
    def step(self) -> int:
        """Number of steps at the last checkpoint; 0 if there is none."""
        return int(self.latest.name.removeprefix("step_")) if self.latest else 0

    @property
    def best(self) -> Path | None:
        """The checkpoint with the lowest known validation loss, or None. The later one wins a tie. Only losses measured
        with the same settings as the last one are compared; a resumed run may change them.

        Raises:
            ValueError, FileNotFoundError: a checkpoint is damaged and could be the best.
        """
        return next(iter(self._lowest(strict=True)), None)

    def _lowest(self, *, strict: bool) -> list[Path]:
        """The checkpoint with the lowest loss of each way to measure it, that of the last one first. Damaged ones are
        left out, or with `strict` raise."""
        lowest: dict[str, tuple[float, Path]] = {}
        for path in reversed(self.checkpoints()):
            try:
                header = read_header(path)
            except (ValueError, FileNotFoundError):
                if strict and path.exists():  # otherwise training has pruned it since
                    raise
                continue
            loss, how = header.get("valid_loss"), _validation(header)
            if isinstance(loss, int | float) and (how not in lowest or loss < lowest[how][0]):
                lowest[how] = loss, path
        return [path for _, path in lowest.values()]

    def prune(self, keep: int) -> None:
        """Remove all checkpoints except the last `keep` and the best one of the last two ways to measure the loss."""
        if keep < 1:
            raise Mistake(f"keep must be at least 1, because the last checkpoint stays, got {keep}. None keeps all.")
        # A damaged one must not stop a run.
        kept = {*self.checkpoints()[-keep:], *self._lowest(strict=False)[:2]}
        for path in self.checkpoints():
            if path not in kept:
                files.remove_folder(path)

    def tidy(self, keep: int) -> None:
        """Remove what killed processes left, and prune as after a save."""
        for folder in (self.path, self.path / "checkpoints"):
            files.remove_unfinished(folder)
        self.prune(keep)

    def put_damaged_aside(self) -> None:
        """Rename damaged checkpoints, so the last sound one is the last, and log a sentence about each.

        A checkpoint without training state is sound, but training cannot resume from it.
        """
        for folder in self.checkpoints():
            sums = folder / files.SEAL
            listed = sums.read_text(encoding="utf-8", errors="replace") if sums.is_file() else ""
            trained = "training." in listed or any(folder.glob("training.*"))
            try:
                for name in FILES if trained else FILES_TO_READ:
                    with name_damage(folder / name):
                        (folder / name).stat()
                        files.check_seal(folder / name)
            except (ValueError, OSError) as error:
                if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and error.errno != errno.EIO:
                    raise
                aside = folder.with_name(f"damaged_{folder.name}")
                if aside.exists():
                    files.remove_folder(aside)
                folder.rename(aside)
                self.say(f"{error} It is {aside.name} now, and does not count.")

    def parameters(self) -> int:
        """The number of parameters, from the header of the last checkpoint's weights."""
        path = self.checkpoints()[-1] / "model.safetensors"
        with name_damage(path), safe_open(files.plain_file(path), "np") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118

    def settings(self) -> RunConfig:
        """The settings in `config.toml`. A wrong one raises `Mistake`."""
        if not (file := self.path / "config.toml").is_file():
            raise FileNotFoundError(f"{file} is missing. It has the settings of the run: restore it.")
        try:
            return load_recipe(file)
        except Mistake as error:
            newer = "if a newer version wrote it, update transformer-xl"
            error.add_note(f"That is in {file}. If it was edited or damaged, restore it; {newer}.")
            raise

    def write_settings(self, config: RunConfig) -> None:
        files.write_whole(self.path / "config.toml", write_toml(config))

    def facts(self) -> dict[str, Any]:
        """The content of `environment.json`; empty if there is no such file.

        Raises:
            Mistake: the file is damaged.
        """
        file = self.path / "environment.json"
        if not file.exists():
            return {}
        advice = "It records how the run began: restore it, or remove it to compare nothing."
        return files.read_table(file, advice, corpus=dict, devices=list)

    def begin(self, config: RunConfig, corpus: Corpus, *, ranks: int, begun: Mapping[str, object]) -> None:
        """Write the settings and facts of a run that begins or goes on. `begun` has some of the facts `BEGUN`."""
        facts = environment() | {"ranks": ranks, "launch": launch_id()} | {name: begun.get(name, "") for name in BEGUN}
        facts["corpus"] = {name: split.sha256 for name, split in corpus.header.splits.items()}
        # First the facts: they identify the run.
        files.write_whole(self.path / "environment.json", json.dumps(facts, indent=2) + "\n")
        self.write_settings(config)

    def began_here(self) -> bool:
        """Whether the torchrun that started this process also began the run, with processes that failed."""
        return bool(launch_id()) and self.facts().get("launch") == launch_id()

    def changed_splits(self, corpus: Corpus) -> str:
        """The splits of a text that have changed since the run began; "" if none is known to differ."""
        known, splits = self.facts().get("corpus") or {}, corpus.header.splits
        changed = [name for name in splits if splits[name].sha256 != known.get(name, splits[name].sha256)]
        return join_words(changed) if changed else ""

    def say(self, line: str) -> None:
        """Append a line to the log, and print it."""
        line, log = printable(line), self.path / "log.txt"
        with files.explain_write_error(log), log.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    @contextmanager
    def claimed(self, *, resume: bool, afresh: bool) -> Iterator[None]:
        """Lock the folder for training in this process. Damaged checkpoints are put aside to resume.

        `refuse` explains the options and what is refused.
        """
        if not (self.path / files.LOCK).exists():  # if there is a lock, report first that a process trains here
            self.refuse(resume=resume, afresh=afresh)
        with files.lock_folder(self.path):
            if resume:
                self.put_damaged_aside()
            self.refuse(resume=resume, afresh=afresh)
            yield

    def refuse(self, *, resume: bool = False, afresh: bool = False) -> None:
        """Refuse a folder that is not empty; with `resume`, refuse a folder without a checkpoint.

        `afresh` allows the folder of a run that saved nothing. A restart by the torchrun that began the run may go on.
        """
        run, last = self.path, self.latest
        files.refuse_odd_name(run, "--out")
        if resume and last is None:
            damaged = sorted(path.name for path in run.glob("checkpoints/damaged_*"))
            advice = "Start again by --resume auto, with RECIPE or --data."
            if damaged:
                advice = f"Restore {join_words(damaged)}, or start anew in another folder, with --out."
            raise FileNotFoundError(f"{run} holds no checkpoint to go on from. {advice}")
        began = (run / "environment.json").exists()
        may = resume or (afresh and began and last is None) or self.began_here()
        if not may and run.exists() and (not run.is_dir() or files.holds_anything(run)):
            again = "Go on with it by txl train --resume"
            again = again if last is not None else "It saved no checkpoint: start it again by txl train --resume auto"
            advice = f"{again}, or choose" if began else "Choose"
            raise FileExistsError(f"{run} exists. {advice} another folder with --out.")


def _validation(header: dict[str, Any]) -> str:
    """The settings of a checkpoint's validation that may change when its run goes on."""
    train, scored = (header[name] if isinstance(header.get(name), dict) else {} for name in ("train", "eval"))
    used = {name: train.get(name) if value is None else value for name, value in scored.items()}
    return json.dumps({**used, "split": "valid", "max_tokens": train.get("eval_tokens")}, sort_keys=True)


def find_checkpoint(path: str | Path, which: Literal["best", "last"] = "best") -> Path:
    """The checkpoint folder at `path`: `path` itself, or the best or last checkpoint of a run.

    Raises:
        FileNotFoundError: `path` does not exist or holds no checkpoint.
    """
    path = Path(path)
    if (path / "model.safetensors").exists():
        return path
    run = Run(path)
    found = (run.best if which == "best" else None) or run.latest
    if found is None:
        state = "does not exist"
        if path.exists():
            state = "has no checkpoint yet" if (path / "config.toml").exists() else "holds no checkpoint"
        raise FileNotFoundError(
            f"{path} {state}. Name a run folder that `txl train` wrote, or one of the folders in its checkpoints/."
        )
    return found


def short_names(runs: Sequence[Path]) -> list[str]:
    """Short names: the fewest last components of the paths that make all names differ. A repeated run is numbered."""
    parts = [run.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        found = ["/".join(each[-depth:]) for each in parts]
        if len(set(found)) == len(set(parts)):
            break
    return [name if found.count(name) == 1 else f"{name} #{index}" for index, name in enumerate(found, start=1)]


def environment() -> dict[str, object]:
    """Versions and hardware, without host name, user or environment variables."""
    packages: dict[str, str | None] = dict.fromkeys(("transformer-xl", "torch", "numpy", "safetensors"))
    for name in packages:
        with suppress(PackageNotFoundError):  # a copy of the source that is not installed
            packages[name] = version(name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "python": platform.python_version(),
        "packages": packages,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores,
        "threads": torch.get_num_threads(),
        "cpu_features": sorted(_FEATURES & set(CPUINFO.read_text().split())) if CPUINFO.exists() else [],
        "cuda": torch.version.cuda,
        "devices": ["cpu", *(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))],
        "backends": list(BACKENDS),
    }
