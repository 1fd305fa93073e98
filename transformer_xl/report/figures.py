"""The figures of a page that need the model: cost by memory length, texts token by token, attention by distance.

`report.json` in the run's folder keeps them with the checkpoint that they are of, so the page needs no model. Figures
of another checkpoint than the run's best are not shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..run import find_checkpoint
from ..runtime.files import SEAL, digest_of, plain_file, write_whole

FILE = "report.json"


class Token(NamedTuple):
    """A token as text. The first token of a document has no cost."""

    text: str
    nats: float | None


class Passage(NamedTuple):
    """A text and what each token costs the model."""

    kind: str
    """ "read": a part of the split; "written": what the model wrote after it."""
    start: int
    """The number of tokens of the split before the first."""
    tokens: Sequence[Token]


class LayerAttention(NamedTuple):
    """The attention of one layer, averaged over some queries."""

    layer: int
    """Counted from 1."""
    queries: int
    tgt_len: int
    mem_len: int
    beyond_segment: Sequence[float]
    """For each layer, the share of attention that goes to memory."""
    ranges: Sequence[tuple[int, int]]
    """Distances in tokens, the first and the last of each range; 0 is the query's own token."""
    shares: Sequence[Sequence[float]]
    """For each head and range, the share of attention."""
    by_distance: Sequence[float]
    """The mean probability of the key at each distance, over all heads."""


class Figures(NamedTuple):
    """What `report.json` holds."""

    checkpoint: Mapping[str, str]
    """The `identity` of the checkpoint."""
    split: str
    costs: Sequence[Mapping[str, Any]]
    """`EvalResult.to_json` at each memory length, for the same targets; the shortest memory first."""
    command: str
    """The command that repeats the costs for RUN; "" if one command cannot."""
    passages: Sequence[Passage]
    attention: LayerAttention | None
    """None for a model without attention."""


def identity(folder: Path) -> dict[str, str]:
    """The name of a checkpoint, and a checksum of its files, or of its weights if no checksums are stored."""
    sums = folder / SEAL
    return {"name": folder.name, "sha256": digest_of(sums if sums.exists() else folder / "model.safetensors")}


def save_figures(run: Path, figures: Figures) -> None:
    """Write the figures to the run's folder."""
    attention = figures.attention and figures.attention._asdict()
    passages = [passage._asdict() for passage in figures.passages]
    stored = figures._asdict() | {"passages": passages, "attention": attention}
    write_whole(run / FILE, json.dumps(stored, allow_nan=False) + "\n")


def load_figures(path: Path) -> Figures:
    """Read the figures from a run's folder; an error of any kind if the file holds something else."""
    stored = json.loads(plain_file(path).read_text("utf-8"))
    read = [
        Passage(str(each["kind"]), int(each["start"]), [_token(*token) for token in each["tokens"]])
        for each in stored["passages"]
    ]
    attention = stored["attention"] and LayerAttention(**stored["attention"])
    figures = Figures(**stored)._replace(passages=read, attention=attention)
    if not figures.costs or not isinstance(figures.checkpoint, dict):
        raise ValueError("it holds no figures")
    return figures


def _token(text: object, nats: object) -> Token:
    return Token(str(text), None if nats is None else float(nats))  # type: ignore[arg-type]


def are_current(figures: Figures, run: Path) -> bool:
    """Whether the figures are of the run's best checkpoint."""
    return figures.checkpoint == identity(find_checkpoint(run))
