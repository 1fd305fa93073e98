"""The commands that produce a trained model: `txl demo`, `txl data`, `txl train`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagConversionOff, Positional, arg

from ...config import recipe as recipes
from ...config.settings import RunConfig
from ...mistake import Mistake
from .command import Command


@dataclass(frozen=True)
class Demo:
    """Train a small model in minutes, score it and generate text. This needs no network and no data."""

    out: Annotated[Path | None, arg(metavar="RUN")] = None
    """Keep the run in this folder; by default the next demo replaces it."""
    minutes: float = 5.0
    """Time for the whole demo, in minutes. On a slow or busy machine it trains for fewer steps."""

    def run(self) -> int:
        begun = time.perf_counter()  # before torch is imported, which takes seconds
        from ..journeys.demo import demo

        return demo(self, begun)


@dataclass(frozen=True)
class Data(Command):
    """Prepare a published corpus: download it, or read a local copy. Without a name, list the corpora."""

    name: Annotated[Positional[str | None], arg(metavar="NAME")] = None
    """enwik8, text8, ptb, ptb-char, wikitext-2, wikitext-2-raw, wikitext-103 or lm1b."""
    source: Annotated[Path | None, arg(metavar="PATH")] = None
    """A local copy: a folder with the published files (or compressed ones), an archive, or a single file."""
    vocab: Annotated[Path | None, arg(metavar="FILE")] = None
    """A file with the vocabulary: one word per line, with or without counts."""
    newlines: Literal["drop", "keep"] | None = None
    """Line ends of enwik8. drop: remove them, as the published protocol does (default); keep: keep every byte."""
    json: bool = False
    """Print one JSON object."""

    journey = "data.data"


@dataclass(frozen=True)
class Train:
    """Train with a recipe, then score the best checkpoint. Any setting can be given as --section.field value."""

    recipe: Annotated[Positional[str | None], arg(metavar="RECIPE")] = None
    """The name of a packaged recipe (`txl recipes` lists them), or a TOML file. Without it, one is chosen for --data:
    by its name for a published corpus, otherwise by the size and the words of the text."""
    data: Annotated[str | None, arg(metavar="PATH")] = None
    """Train on this text file or folder instead. Line ends are kept, and the vocabulary is made from the text. It may
    also be JSON lines (.jsonl), each a document, or token ids (.npy, or nanoGPT's .bin)."""
    out: Annotated[Path | None, arg(metavar="RUN")] = None
    """The run folder; by default runs/RECIPE, or runs/ and the name of --data."""
    init: Annotated[Path | None, arg(metavar="RUN")] = None
    """Start from the weights of this run, with its shape and vocabulary."""
    resume: Annotated[Literal["no", "yes", "auto"], arg(metavar="[auto]")] = "no"
    """Continue the run in --out from its last checkpoint, with its own config.toml. --resume auto: continue the run
    if it saved a checkpoint; otherwise start it."""
    report: bool = True
    """--no-report: do not write the run's page at the end."""
    print_config: bool = False
    """Print the settings as TOML and exit."""
    settings: Annotated[RunConfig, arg(name=""), FlagConversionOff] = field(default_factory=RunConfig)
    """Only for the help: `run` gets the settings as words."""

    def run(self, overrides: Sequence[str]) -> int:
        out = self.out or default_run(self.recipe, self.data)
        saved = any(out.glob("checkpoints/[!.]*"))  # sound or damaged
        resume = self.resume == "yes" or (saved and (self.resume == "auto" or is_restart(out)))
        recipe, why = self.recipe or "", ""
        if resume:
            from ...run import Run
            from ..journeys.train import resumed_settings

            config = resumed_settings(Run(out), self, overrides)
        else:
            defaults: Sequence[str] = ()
            if self.recipe is None:
                from ..journeys.choose import choose_recipe

                recipe, defaults, why = choose_recipe(self.data or "", overrides)
            config = recipes.load_recipe(recipe, [*defaults, *overrides], data=self.data)
        if self.print_config:
            print(f"# {why}\n" * bool(why) + recipes.write_toml(config), end="")
            return 0
        from ...run import Run
        from ..journeys.train import Origin, train

        origin = Origin()
        if not resume:
            given = recipes.chosen_settings(self.recipe, overrides, self.data)
            origin = Origin(recipes.recipe_identity(recipe), self.init, given, why)
        return train(config, Run(out), origin, resume=resume, afresh=self.resume == "auto", page=self.report)


def is_restart(run: Path) -> bool:
    """Whether torchrun started this process to replace processes that failed."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    from ...run import Run

    return Run(run).began_here()


def spell_out_resume(words: Sequence[str]) -> list[str]:
    """Replace `--resume` without a value by `--resume=yes`; otherwise the parser would take RECIPE as its value."""
    pairs = zip_longest(words, words[1:])
    return ["--resume=yes" if word == "--resume" and following != "auto" else word for word, following in pairs]


def default_run(recipe: str | None, data: str | None) -> Path:
    """runs/ and the recipe's name; for the config.toml of a run, the name of that run; without a recipe, the text's."""
    if recipe is None and data is None:
        raise Mistake(
            "RECIPE or --data must be given, got neither. `txl recipes` lists the recipes; `txl train --data PATH` "
            "chooses one for a text."
        )
    if recipe is None:
        text = Path(data or "").resolve()
        return Path("runs") / (text.name if text.is_dir() else text.stem)
    path = Path(recipe)
    return Path("runs") / (path.resolve().parent.name if path.name == "config.toml" else path.stem)
