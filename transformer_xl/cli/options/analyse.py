"""`txl analyse`: the paper's tables and figures from trained models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg, subcommand

Runs = Annotated[
    Positional[tuple[Path, ...]], arg(metavar="RUN ...", help="Run folders, or hf:NAME; all with the same vocabulary.")
]
Split = Annotated[
    Literal["train", "valid", "test", "all"] | None,
    arg(help="By default test, or all if --data has no splits; all: every split, one after another."),
]
Sizes = Annotated[tuple[int, ...], arg(metavar="N ...")]
Clamp = Annotated[
    tuple[int | None, ...],
    arg(metavar="N|none", help="Encode distances beyond this one as this one; by default as the run does."),
]
Out = Annotated[
    Path | None,
    arg(metavar="DIR", help="Write arrays, JSON and, with matplotlib, pictures to this folder."),
]


@dataclass(frozen=True)
class Recl:
    """Compare the relative effective context length of models: Table 8, Figures 3 and 4."""

    runs: Runs
    data: Annotated[str | None, arg(metavar="PATH")] = None
    """Score this text instead of the first run's corpus."""
    split: Split = None
    r: Annotated[tuple[float, ...], arg(metavar="R ...")] = (0.1, 0.5, 1.0)
    """Shares of positions; each takes the ones with the highest loss."""
    step: int = 100
    """The paper's Delta: context lengths are multiples of it."""
    max_context: int = 1000
    positions: int = 2000
    """Number of targets to sample."""
    threshold: float = 0.01
    """The smallest relative gain that counts."""
    clamp_len: Clamp = ()
    trained_context: bool = False
    """Give no model more context than in training."""
    seed: int = 0
    batch_size: int = 16
    """Number of windows in a batch."""
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
    """Measure perplexity or bits at each attention length, and find the shortest one that is as good as the best:
    Table 6."""

    runs: Runs
    data: Annotated[str | None, arg(metavar="PATH")] = None
    """Score this text instead of the first run's corpus."""
    split: Split = None
    attn_len: Sizes = ()
    """By default from a quarter of tgt_len in training to eight times that."""
    max_tokens: int = 0
    """Score at most this many tokens; 0: all."""
    stride: int = 8
    """Models without memory read windows that start this many tokens apart."""
    clamp_len: Clamp = ()
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
    """Draw what each head attends to: by distance, from chosen positions, and term by term. Figures 5 to 7."""

    folder: Annotated[Positional[Path], arg(metavar="RUN", help="A run folder, one of its checkpoints, or hf:NAME.")]
    data: Annotated[str | None, arg(metavar="PATH")] = None
    """Another text, in the run's vocabulary."""
    split: Annotated[
        Literal["train", "valid", "test", "all"] | None,
        arg(help="By default valid, or all if --data has no splits; all: every split, one after another."),
    ] = None
    max_tokens: int = 0
    """Average over at most this many tokens; 0: all."""
    tgt_len: Annotated[int | None, arg(metavar="N")] = None
    mem_len: Annotated[int | None, arg(metavar="N")] = None
    heads: Annotated[tuple[str, ...], arg(metavar="LAYER.HEAD ...")] = ()
    """Heads to draw, counted from 1; by default the three with the greatest mean distance."""
    positions: Sizes = ()
    """Positions whose attention is drawn; by default the middle of the text that is read."""
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
    """Make the paper's tables and figures from trained models: recl, length, attention."""

    part: OmitArgPrefixes[
        Annotated[Recl, subcommand("recl")]
        | Annotated[Length, subcommand("length")]
        | Annotated[Attention, subcommand("attention")]
    ]

    def run(self) -> int:
        return self.part.run()


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about a run, or about several side by side."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...", help="Folders that `txl train` wrote.")]
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """By default report.html in the run's folder, or here for several."""
    title: Annotated[str | None, arg(metavar="TEXT")] = None

    def run(self) -> int:
        from ..journeys.report import report

        report(self.runs, self.out, title=self.title)
        return 0
