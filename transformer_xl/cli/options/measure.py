"""About models and machines: `txl bench`, `txl env`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Bench:
    """Tokens per second, peak memory and share of the bound on this machine: training, evaluating and writing."""

    model: Annotated[Positional[str], arg(metavar="RECIPE|RUN", help="A recipe, a run folder, or hf:NAME.")]
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] | None = None
    """By default that of the recipe or run."""
    seconds: float = 1.0
    """Least duration of a turn."""
    repeats: int = 5
    """Turns of each row, after a warm-up; medians are reported."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from ..journeys.bench import bench

        options = {"device": self.device, "precision": self.precision, "as_json": self.json}
        bench(self.model, seconds=self.seconds, repeats=self.repeats, **options)
        return 0


@dataclass(frozen=True)
class Env:
    """What this machine has, what would run on it, and why."""

    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from ..journeys.env import env

        env(as_json=self.json)
        return 0
