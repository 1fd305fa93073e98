"""The head of the page: what each run is, the figures that matter, and what one should know before believing them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..evaluation.measures import perplexity
from ..runtime.terminal import clock
from .curves import short
from .markup import Markup, join, table, tag
from .record import Record, number, place

UNKNOWN = "\N{EN DASH}"
WORDS = {"ppl": "perplexity", "bpc": "bits per character"}
COLOURS = 6


def opening(records: Sequence[Record]) -> Markup:
    """What each run is, the figures that matter, and what one should know before believing them."""
    if len(records) == 1:
        parts = [tag("p", describe(records[0]), class_="soft"), figures(records[0])]
    else:
        columns = ["run", "corpus", "test", "best valid", "parameters", "tokens", "time", "tokens/s", "steps"]
        parts = [table(columns, [_summary(index, record) for index, record in enumerate(records)], words=2)]
    notes = [(record, note) for record in records for note in remarks(record)]
    lines = [tag("li", tag("b", record.name, ": ") if len(records) > 1 else None, note) for record, note in notes]
    return join([*parts, tag("ul", *lines, class_="notes") if lines else None])


def describe(record: Record) -> str:
    """The model and its text, in a line."""
    kind = record.setting("model", "kind") or "transformer-xl"
    layers, width, heads = (record.setting("model", name) for name in ("n_layer", "d_model", "n_head"))
    shape = f"{layers} layers of {width}, {heads} heads" if layers else "a model of unknown shape"
    corpus = corpus_of(record)
    return f"{'Transformer-XL' if kind == 'transformer-xl' else kind}, {shape}, on {corpus} ({record.unit}s)"


def corpus_of(record: Record) -> str:
    """The corpus by its own name, not by where it lay."""
    named = next((e["corpus"] for e in reversed(record.evaluations) if isinstance(e.get("corpus"), str)), None)
    return named or Path(str(record.setting("corpus", "name") or "a text that is not named")).name


def figures(record: Record) -> Markup:
    """The figures that matter, large."""
    tested, best = record.tested, record.best_valid
    split = record.setting("eval", "split") or "test"
    valid = f"{figure_of(record, best)} on valid, best at step {best['step']:,.0f}" if best else "no validation figure"
    memory = f"memory {tested.get('mem_len')}; " if tested else ""
    train = record.train
    spent = train["seconds"][-1] if len(train["seconds"]) else math.nan
    judged = np.nansum([number(entry.get("seconds")) for entry in record.evaluations])
    planned = exact(number(record.setting("train", "max_steps")))
    precision, backend = (record.setting("train", name) for name in ("precision", "backend"))
    items = [
        (f"{split} {WORDS[record.figure]}", figure_of(record, tested), memory + valid),
        ("parameters", short(record.parameters) if record.parameters else UNKNOWN, exact(record.parameters)),
        ("tokens trained on", short(tokens) if math.isfinite(tokens := tokens_of(record)) else UNKNOWN, exact(tokens)),
        ("time in training steps", clock(spent), f"{speed(record)} tokens/s; {clock(judged)} of evaluation besides"),
        ("steps", f"{record.step:,}", f"of {planned} planned" if planned else "planned: unknown"),
        ("machine", *machine(record), ", ".join(str(name) for name in (precision, backend) if name)),
    ]
    return tag("dl", *(_item(*item) for item in items), class_="figures")


def _item(name: str, value: str, *details: str) -> Markup:
    below = [tag("span", detail, class_="soft") for detail in details if detail]
    lines = [part for detail in below for part in (detail, tag("br"))]
    return tag("div", tag("dt", name), tag("dd", tag("b", value), *lines[:-1]))


def exact(count: float | None) -> str:
    return f"{count:,.0f}" if count and math.isfinite(count) else ""


def tokens_of(record: Record) -> float:
    return float(record.tokens(np.array([float(record.step)]))[0])


def figure_of(record: Record, entry: Any) -> str:
    """A loss as the unit's figure; a dash where there is none."""
    if entry is None:
        return UNKNOWN
    loss = number(entry.get("loss"))
    return tell(record.figure, scaled(record.figure, np.array([loss]))[0]) if math.isfinite(loss) else "not finite"


def tell(figure: str, value: float) -> str:
    """A perplexity to a hundredth, or bits to a ten-thousandth."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.2f}" if figure == "ppl" else f"{value:.4f}"


def scaled(figure: str, loss: np.ndarray) -> np.ndarray:
    """Nats as perplexity or bits; beyond a float: inf."""
    if figure == "bpc":
        return loss / math.log(2)
    return np.array([perplexity(nats) for nats in loss.tolist()])


def speed(record: Record) -> str:
    """Tokens over time, all of training."""
    train = record.train
    if not len(train["step"]) or not train["seconds"][-1] > 0:
        return UNKNOWN
    trained = float(record.tokens(train["step"][-1:])[0])
    return f"{trained / train['seconds'][-1]:,.0f}" if math.isfinite(trained) else UNKNOWN


def machine(record: Record) -> tuple[str, str]:
    """The device that trained, and what it sat in."""
    facts, device = record.environment, str(record.setting("train", "device") or "")
    if not facts:
        return UNKNOWN, ""
    cores = f"{facts.get('cores', '?')} cores, {facts.get('system', 'unknown system')}"
    if not device.startswith("cuda"):
        return f"{facts.get('cores', '?')} cores", str(facts.get("system", ""))
    names = [name for name in facts.get("devices", []) if name != "cpu"]
    index = int(device.partition(":")[2] or 0) if device.partition(":")[2].isdigit() else 0
    return (str(names[index]) if index < len(names) else device), cores


def _summary(index: int, record: Record) -> list[object]:
    planned = exact(number(record.setting("train", "max_steps")))
    train = record.train
    return [
        join([tag("i", class_=f"key {line_class(index)}"), record.name]),
        f"{corpus_of(record)}, {record.unit}s",
        f"{figure_of(record, record.tested)} {record.figure}",
        f"{figure_of(record, record.best_valid)} {record.figure}",
        exact(record.parameters) or UNKNOWN,
        exact(tokens_of(record)) or UNKNOWN,
        clock(train["seconds"][-1] if len(train["seconds"]) else None),
        speed(record),
        f"{record.step:,} of {planned}" if planned else f"{record.step:,}",
    ]


def remarks(record: Record) -> list[str]:
    """What is missing, odd or partial about a run."""
    found = list(record.faults)
    planned, tested = number(record.setting("train", "max_steps")), record.tested
    split = record.setting("eval", "split") or "test"
    if not record.entries:
        found.append("There are no figures yet.")
    elif record.step < planned:
        found.append(f"Training has not ended: this is its state after step {record.step:,} of {planned:,.0f}.")
    elif tested is None:
        found.append(f"There is no {split} figure: the run was not scored at its end, or is being scored now.")
    if tested is not None and not math.isfinite(number(tested.get("loss"))):
        found.append(f"The {split} loss is not finite.")
    if record.partial:
        found.append(f"The corpus is partial: {record.partial}. Its figures are not those of the whole one.")
    train = record.train
    if lost := int((~np.isfinite(train["loss"])).sum()):
        found.append(f"{lost:,} of {len(train['loss']):,} lines of training have no finite loss; crosses mark them.")
    if skipped := int(np.nansum(train["skipped"])):
        found.append(f"{skipped:,} steps were skipped, for their gradient was not finite.")
    if record.starts > 1:
        found.append(
            f"The run was resumed: training began {record.starts} times. Time and speed are of the steps that count; "
            "the environment is that of the last start."
        )
    if init := record.environment.get("init"):
        found.append(f"It started from the weights of {place(str(init))}.")
    return found


def line_class(index: int) -> str:
    return f"c{index % COLOURS}" + (" dashed" if index >= COLOURS else "")
