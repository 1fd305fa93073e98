"""The head of the page: a description of each run, its main figures, and remarks about them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ..evaluation.measures import perplexity
from ..runtime.terminal import clock
from .record import Record, last_part, number

UNKNOWN = "\N{EN DASH}"
WORDS = {"ppl": "perplexity", "bpc": "bits per character"}
COLOURS = 6


def description(record: Record) -> str:
    """The model, its text and the machine, in one line."""
    kind = record.setting("model", "kind") or "transformer-xl"
    layers, width, heads = (record.setting("model", name) for name in ("n_layer", "d_model", "n_head"))
    shape = f"{layers} layers of {width}, {heads} heads" if layers else "a model of unknown shape"
    names = [str(name) for name in record.environment.get("devices") or ["unknown machine"]]
    machine = names[-1] if str(record.setting("train", "device")).startswith("cuda") else names[0]
    chosen = [str(name) for name in (record.setting("train", "precision"), record.setting("train", "backend")) if name]
    text = f"{corpus_of(record)} ({record.unit}s)"
    model = "Transformer-XL" if kind == "transformer-xl" else kind
    return ", ".join([model, shape, f"on {text}; trained on {machine}", *chosen])


def corpus_of(record: Record) -> str:
    """The name of the corpus, without its path."""
    named = next((e["corpus"] for e in reversed(record.evaluations) if isinstance(e.get("corpus"), str)), None)
    return named or Path(str(record.setting("corpus", "name") or "a text that is not named")).name


def main_figures(record: Record) -> dict[str, str]:
    """The figures at the head of the page, by name."""
    planned = exact(number(record.setting("train", "max_steps")))
    end = np.array([float(record.step)])
    tokens, spent = float(record.tokens(end)[0]), float(record.seconds(end)[0])
    return {
        record.setting("eval", "split") or "test": f"{figure_of(record, record.test_entry)} {record.figure}",
        "best on validation": f"{figure_of(record, record.best_valid)} {record.figure}",
        "parameters": exact(record.parameters),
        "tokens trained on": exact(tokens),
        "time in training steps": clock(spent),
        "tokens a second": exact(tokens / spent if spent > 0 else None),
        "steps": f"{record.step:,} of {planned}",
    }


def exact(count: float | None) -> str:
    return f"{count:,.0f}" if count and math.isfinite(count) else UNKNOWN


def figure_of(record: Record, entry: Any) -> str:
    """A loss as perplexity or bits per character; a dash without an entry."""
    if entry is None:
        return UNKNOWN
    [value] = loss_figures(record.figure, np.array([number(entry.get("loss"))]))
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.2f}" if record.figure == "ppl" else f"{value:.4f}"


def loss_figures(figure: str, loss: np.ndarray) -> np.ndarray:
    """Nats as perplexity (inf beyond a float) or bits."""
    if figure == "bpc":
        return loss / math.log(2)
    return np.array([perplexity(nats) for nats in loss.tolist()])


def remarks(record: Record) -> list[str]:
    """The sentences about a run that is unfinished, not finite or damaged."""
    return [*record.faults, *_state(record), *_caveats(record)]


def _state(record: Record) -> list[str]:
    planned, tested = number(record.setting("train", "max_steps")), record.test_entry
    split = record.setting("eval", "split") or "test"
    found = []
    if not record.entries:
        found.append("There are no figures yet.")
    elif record.step < planned:
        found.append(f"Training has not ended: this is its state after step {record.step:,} of {planned:,.0f}.")
    elif tested is None:
        found.append(f"There is no {split} figure: the run was not scored at its end, or is being scored now.")
    if tested is not None and not math.isfinite(number(tested.get("loss"))):
        found.append(f"The {split} loss is not finite.")
    return found


def _caveats(record: Record) -> list[str]:
    found, train = [], record.train
    if lost := int((~np.isfinite(train["loss"])).sum()):
        found.append(f"{lost:,} of {len(train['loss']):,} lines of training have no finite loss.")
    if skipped := int(np.nansum(train["skipped"])):
        found.append(f"{skipped:,} steps were skipped because their gradient was not finite.")
    if init := record.environment.get("init"):
        found.append(f"It started from the weights of {last_part(str(init))}.")
    return found


def line_class(index: int) -> str:
    return f"c{index % COLOURS}" + (" dashed" if index >= COLOURS else "")
