"""`txl analyse`: the paper's tables and figures from trained models. `txl report`: a page about runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg, subcommand

from .command import Command, Folder, Part, Precision, RunFolder, Size, Sizes, Text

Runs = Annotated[
    Positional[tuple[Path, ...]], arg(metavar="RUN ...", help="Run folders, or hf:NAME; all with the same vocabulary.")
]


@dataclass(frozen=True)
class Comparison(Command):
    """The options that both comparisons of runs share."""

    runs: Runs
    data: Text = None
    """Score this text instead of the first run's corpus."""
    split: Part | None = None
    """The split to score. By default test, or all if --data has no splits. all: every split, one after another."""
    device: str = "auto"
    out: Folder = None
    """Write JSON and arrays to this folder, and pictures if matplotlib is installed."""
    json: bool = False


@dataclass(frozen=True)
class Recl(Comparison):
    """Compare the relative effective context length of models: Table 8, Figures 3 and 4."""

    r: Annotated[tuple[float, ...], arg(metavar="R ...")] = (0.1, 0.5, 1.0)
    """Shares of the positions to use: 0.1 uses the tenth with the highest loss."""
    step: int = 100
    """Context lengths are multiples of this (the paper's Delta)."""
    max_context: int = 1000
    positions: int = 2000
    """Number of targets to sample."""
    threshold: float = 0.01
    """The smallest relative gain that counts."""
    trained_context: bool = False
    """Give no model more context than in training."""
    seed: int = 0
    batch_size: int = 16
    """Number of windows in a batch."""
    precision: Precision = "fp32"
    """fp32 by default, because rounding changes losses, and small gains count."""

    journey = "analyse.recl"


@dataclass(frozen=True)
class Length(Comparison):
    """Measure perplexity or bits at each attention length, and find the shortest one that is as good as the best:
    Table 6."""

    attn_len: Sizes = ()
    """By default from a quarter of the tgt_len of training to eight times the tgt_len of training."""
    max_tokens: int = 0
    """Score at most this many tokens; 0: all."""
    stride: int = 8
    """For models without memory: number of tokens between the starts of two windows."""
    batch_size: Size = None
    precision: Precision = "auto"

    journey = "analyse.length"


@dataclass(frozen=True)
class Attention(Command):
    """Draw the attention of each head: by distance, from chosen positions, and by term. Figures 5 to 7."""

    folder: RunFolder
    data: Text = None
    """Read this text instead of the run's. It is tokenised with the run's vocabulary."""
    split: Part | None = None
    """The split to read. By default valid, or all if --data has no splits. all: every split, one after another."""
    max_tokens: int = 0
    """Average over at most this many tokens; 0: all."""
    tgt_len: Size = None
    mem_len: Size = None
    heads: Annotated[tuple[str, ...], arg(metavar="LAYER.HEAD ...")] = ()
    """Heads to draw, counted from 1; by default the three with the greatest mean distance."""
    positions: Sizes = ()
    """Draw the attention of these positions, counted from 0; by default of the middle one."""
    out: Folder = None
    """The folder for the pictures; by default RUN/attention."""
    device: str = "auto"
    precision: Precision = "auto"
    json: bool = False

    journey = "attention.attention"


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
class Report(Command):
    """Write one self-contained HTML page about a run, or about several runs side by side."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...", help="Folders that `txl train` wrote.")]
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """By default report.html in the run's folder; for several runs, report.html in the current folder."""
    title: Annotated[str | None, arg(metavar="TEXT")] = None
    """By default the name of the run, or the number of runs."""
    model: bool = True
    """--no-model: do not run the model for figures that are not stored yet."""
    device: str = "auto"

    journey = "report.report"
