"""About models and machines: `txl bench`, `txl env`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from .command import Command, Precision


@dataclass(frozen=True)
class Bench(Command):
    """Tokens per second, peak memory and share of the bound on this machine: training, evaluating and writing."""

    model: Annotated[Positional[str], arg(metavar="RECIPE|RUN", help="A recipe, a run folder, or hf:NAME.")]
    device: str = "auto"
    precision: Precision | None = None
    """By default that of the recipe or run."""
    seconds: float = 1.0
    """Least duration of a turn."""
    repeats: int = 5
    """Turns of each row, after a warm-up; medians are reported."""
    json: bool = False
    """Print one JSON object."""

    journey = "bench.bench"


@dataclass(frozen=True)
class Env(Command):
    """What this machine has, what would run on it, and why."""

    json: bool = False
    """Print one JSON object."""

    journey = "env.env"
