"""The head of the page: what each run is, its main figures, and what a reader should know before believing them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ..evaluation.measures import perplexity
from ..runtime.terminal import clock
from .curves import short
from .record import Record, last_part, number

UNKNOWN = "\N{EN DASH}"
WORDS = {"ppl": "perplexity", "bpc": "bits per character"}
COLOURS = 6


def description(record: Record) -> str:
    """The model and its text, in a line."""
    kind = record.setting("model", "kind") or "transformer-xl"
    layers, width, heads = (record.setting("model", name) for name in ("n_layer", "d_model", "n_head"))
    shape = f"{layers} layers of {width}, {heads} heads" if layers else "a model of unknown shape"
    corpus = corpus_of(record)
    return f"{'Transformer-XL' if kind == 'transformer-xl' else kind}, {shape}, on {corpus} ({record.unit}s)"


def corpus_of(record: Record) -> str:
    """The corpus by its own name, without the path it was read from."""
    named = next((e["corpus"] for e in reversed(record.evaluations) if isinstance(e.get("corpus"), str)), None)
    return named or Path(str(record.setting("corpus", "name") or "a text that is not named")).name


def main_figures(record: Record) -> list[tuple[str, ...]]:
    """The figures at the head of one run's page: name, value, and details."""
    tested, best = record.tested, record.best_valid
    split, tokens = record.setting("eval", "split") or "test", tokens_of(record)
    memory = f"memory {tested.get('mem_len')}; " if tested else ""
    valid = f"{figure_of(record, best)} on valid, best at step {best['step']:,.0f}" if best else "no validation figure"
    judged = np.nansum([number(entry.get("seconds")) for entry in record.evaluations])
    planned, parameters = planned_steps(record), exact(record.parameters)
    device, host = machine(record)
    chosen = [str(name) for name in (record.setting("train", "precision"), record.setting("train", "backend")) if name]
    return [
        (f"{split} {WORDS[record.figure]}", figure_of(record, tested), memory + valid),
        ("parameters", short(record.parameters) if record.parameters else UNKNOWN, parameters),
        ("tokens trained on", short(tokens) if math.isfinite(tokens) else UNKNOWN, exact(tokens)),
        ("time in training steps", clock(spent(record)), f"{speed(record)} tokens/s; {clock(judged)} of evaluation"),
        ("steps", f"{record.step:,}", f"of {planned} planned" if planned else "planned: unknown"),
        ("machine", device, host, ", ".join(chosen)),
    ]


def row_of(record: Record) -> list[str]:
    """The main figures of one of several runs, in the order of the table's columns."""
    planned = planned_steps(record)
    return [
        f"{corpus_of(record)}, {record.unit}s",
        f"{figure_of(record, record.tested)} {record.figure}",
        f"{figure_of(record, record.best_valid)} {record.figure}",
        exact(record.parameters) or UNKNOWN,
        exact(tokens_of(record)) or UNKNOWN,
        clock(spent(record)),
        speed(record),
        f"{record.step:,} of {planned}" if planned else f"{record.step:,}",
    ]


def exact(count: float | None) -> str:
    return f"{count:,.0f}" if count and math.isfinite(count) else ""


def planned_steps(record: Record) -> str:
    return exact(number(record.setting("train", "max_steps")))


def tokens_of(record: Record) -> float:
    return float(record.tokens(np.array([float(record.step)]))[0])


def spent(record: Record) -> float:
    """Seconds of training steps; nan where unknown."""
    return record.train["seconds"][-1] if len(record.train["seconds"]) else math.nan


def figure_of(record: Record, entry: Any) -> str:
    """A loss as the unit's figure; a dash where there is none."""
    if entry is None:
        return UNKNOWN
    loss = number(entry.get("loss"))
    return figure_text(record.figure, scaled(record.figure, np.array([loss]))[0])


def figure_text(figure: str, value: float) -> str:
    """A perplexity to a hundredth, or bits to a ten-thousandth."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.2f}" if figure == "ppl" else f"{value:.4f}"


def scaled(figure: str, loss: np.ndarray) -> np.ndarray:
    """Nats as perplexity (inf beyond a float) or bits."""
    if figure == "bpc":
        return loss / math.log(2)
    return np.array([perplexity(nats) for nats in loss.tolist()])


def speed(record: Record) -> str:
    """Tokens per second, over all of training."""
    if not spent(record) > 0:
        return UNKNOWN
    return exact(float(record.tokens(record.train["step"][-1:])[0]) / spent(record)) or UNKNOWN


def machine(record: Record) -> tuple[str, str]:
    """The device that trained, and its host."""
    facts, device = record.environment, str(record.setting("train", "device") or "")
    if not facts:
        return UNKNOWN, ""
    cores = f"{facts.get('cores', '?')} cores"
    if not device.startswith("cuda"):
        return cores, str(facts.get("system", ""))
    names = [name for name in facts.get("devices", []) if name != "cpu"]
    index = int(device.partition(":")[2] or 0) if device.partition(":")[2].isdigit() else 0
    host = f"{cores}, {facts.get('system', 'unknown system')}"
    return (str(names[index]) if index < len(names) else device), host


def remarks(record: Record) -> list[str]:
    """What is missing, odd or partial about a run."""
    return [*record.faults, *_state(record), *_caveats(record)]


def _state(record: Record) -> list[str]:
    planned, tested = number(record.setting("train", "max_steps")), record.tested
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
    if record.partial:
        found.append(f"The corpus is partial: {record.partial}. Its figures do not stand for the whole corpus.")
    if lost := int((~np.isfinite(train["loss"])).sum()):
        found.append(f"{lost:,} of {len(train['loss']):,} lines of training have no finite loss; crosses mark them.")
    if skipped := int(np.nansum(train["skipped"])):
        found.append(f"{skipped:,} steps were skipped because their gradient was not finite.")
    if record.starts > 1:
        found.append(
            f"The run was resumed: training began {record.starts} times. Time and speed cover the steps that count; "
            "the environment is the last start's."
        )
    if init := record.environment.get("init"):
        found.append(f"It started from the weights of {last_part(str(init))}.")
    return found


def line_class(index: int) -> str:
    return f"c{index % COLOURS}" + (" dashed" if index >= COLOURS else "")
