"""Run the commands and the Python of a page in a small folder, as a reader would run them one after another.

A page's blocks share one folder and one namespace. Every command of this package runs with small settings. The commands
in `ONLY_READ` cannot run in a test; the real parser of the command line still reads them, and reads their settings.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tyro

from benchmarks.options import Options
from experiments import parts
from transformer_xl.commands import main as cli
from transformer_xl.config.recipe import load_recipe, packaged_recipes

SIZES = "--model.n-layer 1 --model.d-model 16 --model.d-inner 32 --train.tgt-len 16"
HEADS = "--model.n-head 2 --model.d-head 8"
BANDS = "--model.cutoffs= --model.div-val 1 --model.tie-projs="
STEPS = "--train.max-steps 4 --train.batch-size 4 --train.warmup-steps 0 --train.log-every 2 --train.eval-every 0"
STEPS += " --train.save-every 2 --train.sample-every 0 --train.average-from 0 --eval.max-tokens 100"
SMALL = shlex.split(" ".join((SIZES, HEADS, BANDS, STEPS)))
"""Settings for a run of a second. A test adds them to every training command."""
LIMITS = {
    "eval": "--max-tokens 100",
    "generate": "--max-tokens 5",
    "analyse recl": "--positions 8 --max-context 40 --step 20",
    "analyse length": "--max-tokens 100 --attn-len 8 16",
    "analyse attention": "--max-tokens 200 --positions 100 --heads 1.1 1.2",
}
"""What a test adds to other commands. It replaces the same options."""
ONLY_READ = {
    r"^txl data ": "it downloads or reads a published corpus; tests/data/test_download.py does so from a local server",
    r"^txl demo": "it takes minutes; tests/commands/test_demo.py runs it",
    r"^txl env --check": "it needs a GPU; tests/commands/test_cli.py refuses it without one",
    r"\bhf:": "it asks the Hugging Face hub; tests/interop/test_huggingface.py has a local copy",
    r"^txl convert .*--from ": "the file of another program is large; tests/interop converts small ones",
    r"\bwt103\b": "it needs a converted checkpoint of another program; tests/interop has small ones",
    r"^txl serve ": "it runs until a signal ends it; tests/serving/test_api.py starts it",
    r"--compile|--train\.compile": "it needs a C++ compiler and a minute",
    r"--train\.trackers": "it needs another package; tests/train/test_trackers.py runs it",
    r"^torchrun ": "it needs several processes; tests/train/test_distributed.py starts them",
    r"^python -m benchmarks ": "it needs other libraries or minutes; tests/benchmarks runs small sizes",
}
"""The commands that a test does not run, by their form, and why."""
OF_THE_SYSTEM = r"(\.|make|mkdir|cp|printf|pip|export|\S+/pip|python3 -m venv) "
"""Commands that are not of this package."""
TEXTS = sorted(Path(os.__file__).parent.glob("json/*.py"))


def prepare_folder(folder: Path) -> None:
    """Put a folder of texts, a file of lines and a trained run where the commands of a page expect them."""
    for name in ("my", "published"):
        (folder / name).mkdir(parents=True)
        for text in TEXTS:
            shutil.copy(text, folder / name)
    (folder / "lines.txt").write_text("the first line\nand a second\n")
    (folder / "text.txt").write_bytes(TEXTS[0].read_bytes())
    (folder / "shakespeare_char").mkdir()
    for name in ("train.bin", "val.bin"):
        np.resize(np.arange(65, dtype="<u2"), 999).tofile(folder / "shakespeare_char" / name)


def commands_of(block: str) -> Iterator[list[str]]:
    """The commands of a shell block as words, without comments and prompts. `&&` joins several."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            yield words[:end]
            words = words[end + 1 :]


def plain_form(words: Sequence[str]) -> list[str]:
    """`txl ...` for each way to start this package: from .venv, or as a module."""
    if words[:3] == ["python", "-m", "transformer_xl"]:
        return ["txl", *words[3:]]
    return ["txl", *words[1:]] if words[0].endswith("/txl") else list(words)


def reason_to_read_only(line: str) -> str | None:
    return next((reason for form, reason in ONLY_READ.items() if re.search(form, line)), None)


class Page:
    """What a page's commands have in common: the folder that they run in, and the run that they may use."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.patch = run, monkeypatch
        self.ran: list[str] = []
        self.read: list[str] = []

    def command(self, words: list[str]) -> None:
        """Run one command, or only read it."""
        line = shlex.join(words)
        if re.match(OF_THE_SYSTEM, line):
            return
        words = plain_form(words)
        line = shlex.join(words)
        if reason_to_read_only(line):
            self.read_command(words)
            self.read.append(line)
            return
        if words[:3] == ["python", "-m", "experiments.parts"]:
            assert "--table" in words, f"{line}: everything but a table takes hours"
            parts.main(words[3:])
            self.ran.append(line)
            return
        assert words[0] == "txl", f"{line}: neither a command of txl, nor one that a test may leave out"
        status = cli.main(self.small(words[1:]))
        assert status == 0, f"status {status}: {line}"
        self.ran.append(line)

    def read_command(self, words: list[str]) -> None:
        """Read a command with the parser of its program, and the settings of `train`. Do not carry it out."""
        if words[0] == "torchrun":
            words = ["txl", *words[words.index("transformer_xl") + 1 :]]
        if words[0] == "python":
            tyro.cli(Options, args=words[3:])
            return
        with self.patch.context() as patch:
            if words[1] == "train":
                plain = re.sub(r" --resume( auto)?\b", "", shlex.join(words))
                words = [*shlex.split(plain), "--print-config"]
            else:
                for command in map(cli.command_class, cli.COMMANDS):
                    patch.setattr(command, "run", lambda *_: 0)
            assert cli.main(words[1:]) == 0, shlex.join(words)

    def small(self, words: list[str]) -> list[str]:
        """The same command at small sizes, with everything that it reads."""
        if words[0] == "train":
            return self.small_train(words)
        for word in words[1:]:
            self.supply(word)
        name = " ".join(words[:2]) if words[0] == "analyse" else words[0]
        return with_options(words, shlex.split(LIMITS.get(name, "")))

    def small_train(self, words: list[str]) -> list[str]:
        """A training command with `SMALL` settings, on a small text instead of a published corpus.

        Commands of a list are alternatives, so each may use the folder of the one before it.
        """
        recipe = words[1] if len(words) > 1 and not words[1].startswith("--") else None
        data, out = option(words, "--data"), option(words, "--out")
        if "--resume" in words and option(words, "--resume") != "auto":
            self.supply_begun(words, recipe, out)
            return [*words, "--train.max-steps", "6"]
        for read in (data, option(words, "--init")):
            self.supply(read)
        if recipe in packaged_recipes() and not data:
            words = [*words, "--data", "published/"]
        shutil.rmtree(Path(out or f"runs/{recipe or Path(data or '').name}"), ignore_errors=True)
        if option(words, "--init"):
            return [*words, *shlex.split(STEPS)]
        heads = [] if {"lstm", "qrnn"} & {*words} else shlex.split(HEADS)
        return [*words, *shlex.split(f"{SIZES} {BANDS} {STEPS}"), *heads]

    def supply_begun(self, words: list[str], recipe: str | None, out: str | None) -> None:
        """Begin the run that a command resumes, if no command of the page did."""
        if recipe is None:
            self.supply(out)
        elif not Path(out or "").exists():
            assert cli.main(self.small_train([word for word in words if word != "--resume"])) == 0

    def supply(self, word: str | None) -> None:
        """Copy the trained run, or a text, to a path that a command reads."""
        path = Path(word) if word and not word.startswith("-") else None
        if path is None or path.exists() or os.path.isabs(path):
            return
        if path.parts[0] == "runs":
            shutil.copytree(self.run, Path(*path.parts[:2]), dirs_exist_ok=True)
        elif word and word.endswith("/"):
            shutil.copytree("published", path)
        elif path.suffix == ".txt":
            shutil.copy("text.txt", path)

    def python(self, source: str) -> None:
        """Supply the runs that a block of Python loads."""
        for run in re.findall(r'load_model\("(runs/[^"]+)"', source):
            self.supply(run)


def option(words: Sequence[str], name: str) -> str | None:
    """The value of an option; None without it."""
    return words[words.index(name) + 1] if name in words[:-1] else None


def with_options(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """The command with these options and their values, which replace its own."""
    names = {word for word in options if word.startswith("--")}
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word in names
        kept += [] if dropping else [word]
    return [*kept, *options]


def small_recipe(recipe: str, overrides: Sequence[str] = (), **options: str) -> object:
    """`load_recipe` with small settings, for the Python of pages."""
    return load_recipe(recipe, [*overrides, *SMALL], **options)
