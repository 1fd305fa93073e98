"""`txl analyse`: the paper's tables and figures from trained models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import OmitArgPrefixes, subcommand

from .attention import Attention
from .length import Length
from .recl import Recl


@dataclass(frozen=True)
class Analyse:
    """Make the paper's tables and figures from trained models: recl, length, attention."""

    part: OmitArgPrefixes[
        Annotated[Recl, subcommand("recl")]
        | Annotated[Length, subcommand("length")]
        | Annotated[Attention, subcommand("attention")]
    ]

    def run(self) -> None:
        self.part.run()
