"""The facts about runs: their main figures, what is missing, and the settings that differ from the recipe or between
runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from ..config.recipe import load_recipe, packaged_recipes
from ..config.shape import RECURRENT
from ..data.vocab import units_of
from ..evaluation.score import figure
from ..paper.exhibits import exhibits, rows_of
from ..runtime.files import last_part
from ..runtime.terminal import clock
from .record import Entry, Record, number

UNKNOWN = "\N{EN DASH}"
COLOURS = 6


class Table(NamedTuple):
    """A table for the template. Its first `words` columns hold words; the others hold figures, aligned to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    words: int = 1


class Facts(NamedTuple):
    """Facts about runs for the template."""

    note: str
    differing: Table | None
    others: Mapping[str, Sequence[tuple[str, str]]]
    """Names and values by section."""


def description(record: Record) -> str:
    """The model, its text and the machine, in one line."""
    model, train = record.config.model, record.config.train
    kind = "Transformer-XL" if model.kind == "transformer-xl" else model.kind
    shape = f"{model.n_layer} layers of {model.d_model}"
    shape += "" if model.base_kind in RECURRENT else f", {model.n_head} heads"
    devices = record.environment.get("devices")
    names = devices if isinstance(devices, list) and devices else ["an unknown machine"]
    where, _, number = train.device.partition(":")
    machine = names[min(int(number or 0) + 1, len(names) - 1) if where == "cuda" else 0]
    text = f"{record.corpus} ({units_of(record.config.corpus.unit)})"
    return f"{kind}, {shape}, on {text}; trained on {machine}, {train.precision}, {train.backend}"


def main_figures(record: Record) -> dict[str, str]:
    """The figures at the head of the page, by name."""
    end = np.array([float(record.step)])
    tokens, spent = float(record.tokens(end)[0]), float(record.seconds(end)[0])
    return {
        record.config.eval.split: figure_of(record, record.test_entry),
        "best on validation": figure_of(record, record.best_valid),
        "parameters": exact(record.parameters),
        "tokens trained on": exact(tokens),
        "time in training steps": clock(spent),
        "tokens per second": exact(tokens / spent if spent > 0 else None),
        "steps": f"{record.step:,} of {record.config.train.max_steps:,}",
    }


def exact(count: float | None) -> str:
    return f"{count:,.0f}" if count and math.isfinite(count) else UNKNOWN


def figure_of(record: Record, entry: Entry | None) -> str:
    """The loss of an entry as perplexity or bits per character; a dash without an entry."""
    return UNKNOWN if entry is None else loss_text(record, number(entry.get("loss")))


def loss_text(record: Record, loss: float) -> str:
    """Nats as perplexity or bits per character."""
    name, value = figure(record.config.corpus.unit, loss)
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.2f} ppl" if name == "ppl" else f"{value:.4f} bpc"


def remarks(record: Record) -> list[str]:
    """Sentences about what is unfinished, missing or not finite."""
    found, train = _state(record), record.train
    if record.figures is None and record.parameters is not None:
        found.append("The figures of the best checkpoint that need the model are missing. `txl report` computes them.")
    if lost := int((~np.isfinite(train["loss"])).sum()):
        found.append(f"{lost:,} of {len(train['loss']):,} lines of training have no finite loss.")
    if skipped := int(np.nansum(train["skipped"])):
        found.append(f"{skipped:,} steps were skipped because their gradient was not finite.")
    if overflows := int(np.nansum(train["overflows"])):
        found.append(f"{overflows:,} steps overflowed in fp16, halved the scale of the loss, and were skipped.")
    if init := record.environment.get("init"):
        found.append(f"It started from the weights of {last_part(str(init))}.")
    return found


def _state(record: Record) -> list[str]:
    planned, split = record.config.train.max_steps, record.config.eval.split
    if not record.entries:
        return ["There are no figures yet."]
    if record.step < planned:
        return [f"Training has not ended: this is its state after step {record.step:,} of {planned:,}."]
    if record.test_entry is None:
        return [f"There is no {split} figure: the run was not scored at its end, or is being scored now."]
    if not math.isfinite(number(record.test_entry.get("loss"))):
        return [f"The {split} loss is not finite."]
    return []


def line_class(index: int) -> str:
    """The class of a run's curves, which gives their colour."""
    return f"c{index % COLOURS}" + (" dashed" if index >= COLOURS else "")


def beside_paper(records: Sequence[Record]) -> dict[str, Table]:
    """The paper's tables that have rows like these runs, by their titles, with the runs' figures in those rows."""
    several = len(records) > 1
    ours: dict[str, list[str]] = {}
    for record in records:
        result = figure_of(record, record.test_entry)
        for row in rows_of(record.config, str(record.environment.get("recipe"))):
            ours.setdefault(row, []).append(f"{record.name}: {result}" if several else result)
    tables = {}
    for name, exhibit in exhibits().items():
        if name.startswith("table") and ours.keys() & {*exhibit.rows()}:
            last = "these runs" if several else "this run"
            columns = [*exhibit.columns, *(f"paper: {what}" for what in exhibit.published), last]
            lines = [[*line.cells, *line.paper, ", ".join(ours.get(line.row, [UNKNOWN]))] for line in exhibit.lines]
            title = f"{name.replace('-', ' ').capitalize()} of the paper: {exhibit.title}"
            tables[title] = Table(columns, lines, words=len(exhibit.columns))
    return tables


def settings(records: Sequence[Record]) -> Facts:
    """The settings of one run beside its recipe, or of several runs side by side."""
    columns = {record.name: flat(asdict(record.config)) for record in records}
    if len(records) > 1:
        return compare(columns)
    [own], name = columns.values(), str(records[0].environment.get("recipe"))
    if name not in packaged_recipes():
        return compare(columns, "The run does not name a packaged recipe. These are all settings.")
    recipe = flat(asdict(load_recipe(name)))
    recipe |= {key: own[key] for key in recipe if recipe[key] == "auto" or key == "model.vocab_size"}
    return compare({"this run": own, "recipe": recipe}, f"The recipe is {name}.")


def compare(columns: Mapping[str, Mapping[str, str]], note: str = "") -> Facts:
    """A table of the facts that differ between the columns, and the others by section."""
    rows = [
        [name, *(facts.get(name, UNKNOWN) for facts in columns.values())]
        for name in dict.fromkeys(name for facts in columns.values() for name in facts)
    ]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    others: dict[str, list[tuple[str, str]]] = {}
    for name, *values in rows:
        if len(set(values)) == 1:
            section, _, key = name.rpartition(".")
            others.setdefault(section, []).append((key, values[0]))
    return Facts(note, Table(["", *columns], differing) if differing else None, others)


def flat(facts: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Nested facts by dotted name, as people write them."""
    found: dict[str, str] = {}
    for name, value in facts.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": _word(value)}
    return found


def _word(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_word, value)) or "none"
    if value is None or value == "":
        return "none"
    return str(value).lower() if isinstance(value, bool) else last_part(str(value))
