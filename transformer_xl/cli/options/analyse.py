"""`txl analyse`: the paper's tables and figures from trained models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg, subcommand

Runs = Annotated[
    Positional[tuple[Path, ...]], arg(metavar="RUN ...", help="Run folders, or hf:NAME; all of one vocabulary.")
]
Split = Annotated[
    Literal["train", "valid", "test", "all"] | None,
    arg(help="By default test, or all of a --data that names no splits; all: every split one after another."),
]
Sizes = Annotated[tuple[int, ...], arg(metavar="N ...")]
Out = Annotated[
    Path | None, arg(metavar="DIR", help="Keep the arrays, the JSON and, with matplotlib, the pictures here.")
]


@dataclass(frozen=True)
class Recl:
    """Relative effective context length of models side by side: Table 8, Figures 3 and 4."""

    runs: Runs
    data: Annotated[str | None, arg(metavar="PATH")] = None
    """Score this text instead of the first run's."""
    split: Split = None
    r: Annotated[tuple[float, ...], arg(metavar="R ...")] = (0.1, 0.5, 1.0)
    """Shares of positions, the hardest ones."""
    step: int = 100
    """The paper's Delta: contexts are its multiples."""
    max_context: int = 1000
    positions: int = 2000
    """How many targets to sample."""
    threshold: float = 0.01
    """The relative gain that still counts."""
    clamp_len: Annotated[int | None, arg(metavar="N")] = None
    trained_context: bool = False
    """Give no model more context than in training."""
    seed: int = 0
    batch_size: int = 16
    """Windows read side by side."""
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    out: Out = None
    json: bool = False

    def run(self) -> int:
        from ..journeys.analyse import recl

        recl(**_arguments(self))
        return 0


@dataclass(frozen=True)
class Length:
    """Perplexity or bits against attention length, the best, and the shortest as good as it: Table 6."""

    runs: Runs
    data: Annotated[str | None, arg(metavar="PATH")] = None
    """Score this text instead of the first run's."""
    split: Split = None
    attn_len: Sizes = ()
    """By default from a quarter of the training segment to eight of it."""
    max_tokens: int = 0
    """Score the first so many tokens; 0: all."""
    stride: int = 8
    """Models without memory read windows so many tokens apart."""
    clamp_len: Annotated[int | None, arg(metavar="N")] = None
    batch_size: Annotated[int | None, arg(metavar="N")] = None
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    out: Out = None
    json: bool = False

    def run(self) -> int:
        from ..journeys.analyse import length

        length(**_arguments(self))
        return 0


@dataclass(frozen=True)
class Attention:
    """What each head attends to by distance, in chosen places, and term by term: Figures 5 to 7."""

    folder: Annotated[Positional[Path], arg(metavar="RUN", help="A run folder, one of its checkpoints, or hf:NAME.")]
    data: Annotated[str | None, arg(metavar="PATH")] = None
    """Another text, in the run's vocabulary."""
    split: Annotated[
        Literal["train", "valid", "test", "all"] | None,
        arg(help="By default valid, or all of a --data that names no splits; all: every split one after another."),
    ] = None
    max_tokens: int = 0
    """Average over the first so many tokens; 0: all."""
    tgt_len: Annotated[int | None, arg(metavar="N")] = None
    mem_len: Annotated[int | None, arg(metavar="N")] = None
    heads: Annotated[tuple[str, ...], arg(metavar="LAYER.HEAD ...")] = ()
    """Counted from 1; by default the three that look furthest."""
    positions: Sizes = ()
    """Tokens to look back from; by default the middle of what is read."""
    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """By default RUN/attention."""
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    json: bool = False

    def run(self) -> int:
        from ..journeys.attention import attention

        arguments = _arguments(self)
        attention(arguments.pop("folder"), **arguments)
        return 0


def _arguments(command: object) -> dict[str, Any]:
    named = dict(vars(command))
    return named | {"as_json": named.pop("json")}


@dataclass(frozen=True)
class Analyse:
    """The paper's tables and figures from trained models: recl, length, attention."""

    part: OmitArgPrefixes[
        Annotated[Recl, subcommand("recl")]
        | Annotated[Length, subcommand("length")]
        | Annotated[Attention, subcommand("attention")]
    ]

    def run(self) -> int:
        return self.part.run()


@dataclass(frozen=True)
class Report:
    """One self-contained HTML page about a run, or several side by side."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...", help="Folders that `txl train` wrote.")]
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """By default report.html in the run's folder, or here for several."""
    title: Annotated[str | None, arg(metavar="TEXT")] = None

    def run(self) -> int:
        from ..journeys.report import report

        report(self.runs, self.out, title=self.title)
        return 0
