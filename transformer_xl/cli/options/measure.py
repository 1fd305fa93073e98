"""Commands that measure models and machines: `txl bench`, `txl recipes`, `txl env`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from .command import Command, Precision


@dataclass(frozen=True)
class Bench(Command):
    """Measure tokens per second, peak memory and share of the bound for training, evaluation and generation."""

    model: Annotated[Positional[str], arg(metavar="RECIPE|RUN", help="A recipe, a run folder, or hf:NAME.")]
    device: str = "auto"
    precision: Precision | None = None
    """By default the precision of the recipe or run."""
    seconds: float = 1.0
    """Minimum duration of one measurement."""
    repeats: int = 5
    """Number of measurements for each row, after a warm-up. The medians are printed."""
    json: bool = False
    """Print one JSON object."""

    journey = "bench.bench"


@dataclass(frozen=True)
class Recipes(Command):
    """List the recipes: model, data, parameters, memory to train, time on this machine if measured, results."""

    names: Annotated[
        Positional[tuple[str, ...]], arg(metavar="RECIPE ...", help="By default all packaged recipes.")
    ] = ()
    measure: bool = False
    """Time training steps of these recipes on this machine, and keep the result in the cache folder."""
    device: str = "auto"
    """For --measure."""
    seconds: float = 1.0
    """For --measure: minimum duration of one measurement."""
    repeats: int = 3
    """For --measure: number of measurements. The median counts."""
    json: bool = False
    """Print one JSON object."""

    journey = "recipes.list_recipes"


@dataclass(frozen=True)
class Env(Command):
    """Print the hardware and versions of this machine, and what `auto` chooses on it, with reasons."""

    check: bool = False
    """First compare the fused kernels with float64 on the CUDA device, in one or two minutes. `auto` trains with them
    only on a card where they passed, with the same versions and source."""
    json: bool = False
    """Print one JSON object."""

    journey = "env.env"
