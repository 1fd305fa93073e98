"""About models and machines: `txl bench`, `txl env`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Bench:
    """Time a part of the work beside its peers and its bound; the last line is JSON."""

    part: Annotated[
        Positional[Literal["train", "eval", "decode", "op", "sliding", "memory", "data", "all"]],
        arg(metavar="train|eval|decode|op|sliding|memory|data|all"),
    ]
    """train: optimizer steps; eval: segments; decode: a token at a time; op: attention alone; sliding: the paper's
    Table 9; memory: the most a training step holds; data: from text to ids; all: all but data."""
    size: Literal["paper", "toy"] | None = None
    """toy: the same code at sizes that take seconds. By default paper."""
    recipe: Annotated[str | None, arg(metavar="RECIPE")] = None
    """Whose model; by default enwik8-12l."""
    peers: Annotated[str | None, arg(metavar="PYTHON")] = None
    """The Python of an environment with torch, transformers 4.37.2 and, if wanted, x-transformers."""
    device: str | None = None
    precision: Literal["fp32", "bf16"] | None = None
    """Ours and the textbook's; by default both."""
    batch_size: Annotated[int | None, arg(metavar="N")] = None
    tgt_len: Annotated[int | None, arg(metavar="N")] = None
    mem_len: Annotated[int | None, arg(metavar="N")] = None
    """Tokens of memory; sliding: the attention length."""
    repeats: Annotated[int | None, arg(metavar="N")] = None
    """How many turns each contender takes; medians are shown. By default 5, for data 1."""
    megabytes: Annotated[int | None, arg(metavar="N")] = None
    """data: size of the text; by default 540, as WikiText-103 has."""
    counts: Annotated[Path | None, arg(metavar="FILE")] = None
    """data: draw words by the counts in this file; by default made-up words under Zipf's law."""

    def run(self) -> int:
        from ...bench import bench

        bench(self.part, {name: value for name, value in vars(self).items() if name != "part"})
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
