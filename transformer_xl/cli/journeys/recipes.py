"""`txl recipes`: every recipe with its size, its needs and its results; `--measure` times its steps on this machine.

Nothing is guessed: a time is the number of steps times the seconds of a step that was measured here.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ...analysis.budget import training_bytes
from ...analysis.peak import first_step
from ...config import recipe as recipes
from ...config.settings import RunConfig
from ...data.datasets import cache_folder, store_of
from ...data.header import Header
from ...mistake import Mistake
from ...model.baselines import build_model
from ...runtime.device import prepare_process
from ...runtime.files import write_whole
from ...runtime.terminal import clock, report_progress, show_table
from ...train import choices
from ...train.folder import environment
from ..options.measure import Bench, Recipes
from .bench import check_repeats, measured_row, on_this_machine

MEASUREMENTS = "measured.json"
"""The file in the cache folder with the last measurement of each recipe."""


def list_recipes(options: Recipes) -> None:
    """Print a row for each recipe, or for the ones named; with `measure`, time their steps first."""
    if options.measure and not options.names:
        raise Mistake("RECIPE must be given with --measure, because measuring all recipes takes hours. Name some.")
    check_repeats(options)
    names = options.names or tuple(recipes.packaged_recipes())
    configs = {name: with_vocabulary(recipes.load_recipe(name)) for name in names}
    if options.measure:
        measure({name: require_vocabulary(name, config) for name, config in configs.items()}, options)
    results, measured = read_results(), read_measurements()
    entries = [recipe_facts(name, config, results, measured) for name, config in configs.items()]
    if options.json:
        print(json.dumps({"recipes": entries}))
        return
    title = (
        "`txl train RECIPE` trains one. Memory: an estimate for training. Time: steps x seconds measured here, or -; "
        "`txl recipes RECIPE --measure` measures it."
    )
    columns = ["recipe", "model", "data", "parameters", "memory, GB", "steps", "s/step", "time", "published", "ours"]
    show_table(title, columns, [*map(_cells, entries)])
    for entry in entries:
        if entry["measured"]:
            print(
                "{recipe}: measured on {date}, {device}, {precision}.".format(recipe=entry["name"], **entry["measured"])
            )


def with_vocabulary(config: RunConfig) -> RunConfig:
    """The recipe with its vocabulary size if that can be known: all bytes of any text, or of a prepared corpus."""
    if config.model.vocab_size:
        return config
    store = store_of(config.corpus.name) if config.corpus.name else None
    size = Header.read(store / "corpus.json").vocab_size if store else 0
    if not config.corpus.name and config.corpus.unit == "byte":
        size = 256
    return replace(config, model=replace(config.model, vocab_size=size))


def require_vocabulary(name: str, config: RunConfig) -> RunConfig:
    """`config`; raise `Mistake` if its vocabulary size is not known."""
    if not config.model.vocab_size:
        raise Mistake(
            f"RECIPE must have a known vocabulary, and {name} takes it from its text. Time a run: `txl bench RUN`."
        )
    return config


def recipe_facts(
    name: str, config: RunConfig, results: Mapping[str, Any], measured: Mapping[str, Any]
) -> dict[str, Any]:
    """The facts about a recipe. None: not known."""
    model, train = config.model, config.train
    chosen = {what: choice["name"] for what, choice in choices(train, model).items()}
    parameters = count_parameters(config) if model.vocab_size else None
    memory = None
    if parameters is not None:
        memory = training_bytes(config, parameters, precision=chosen["precision"], backend=chosen["backend"])
    entry = measured.get(_key(config))
    here = entry if isinstance(entry, dict) and entry.get("machine") == _machine() else None
    return {
        "name": name,
        "model": {"kind": model.kind, "n_layer": model.n_layer, "d_model": model.d_model},
        "data": config.corpus.name,
        "unit": config.corpus.unit,
        "parameters": parameters,
        "memory_bytes": memory,
        "steps": train.max_steps,
        "measured": here,
        "seconds": here and here["seconds_per_step"] * train.max_steps,
        **{what: results.get(name, {}).get(what) for what in ("published", "own")},
    }


def count_parameters(config: RunConfig) -> int:
    """The exact number of parameters, tied ones once. Nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(config.model).parameters())


def read_results() -> dict[str, Any]:
    """The published and own test results of the packaged recipes, as text."""
    return tomllib.loads(Path(recipes.__file__).with_name("results.toml").read_text(encoding="utf-8"))


def read_measurements() -> dict[str, Any]:
    """The last measurement of each recipe, by `_key`; empty if there is none or the file is damaged."""
    file = cache_folder() / MEASUREMENTS
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError:
        content = {}
    return content if isinstance(content, dict) else {}


def measure(configs: Mapping[str, RunConfig], options: Recipes) -> None:
    """Time training steps as `txl bench` does, and keep the result in the cache folder."""
    prepare_process()
    first_step()
    for name in report_progress(list(configs), "timing"):
        config = on_this_machine(configs[name], options.device, None)
        row = measured_row("train", config, Bench(name, seconds=options.seconds, repeats=options.repeats))
        entry = {
            "seconds_per_step": row["seconds"],
            "peak_bytes": row["peak_bytes"],
            "device": config.train.device,
            "precision": config.train.precision,
            "date": date.today().isoformat(),
            "machine": _machine(),
        }
        kept = read_measurements() | {_key(configs[name]): entry}
        write_whole(cache_folder() / MEASUREMENTS, json.dumps(kept, indent=2) + "\n")


def _key(config: RunConfig) -> str:
    """The name of a measurement: a checksum of the settings, so a changed recipe has none."""
    return hashlib.sha256(recipes.write_toml(config).encode()).hexdigest()[:16]


def _machine() -> str:
    """The facts of this machine for which a time holds."""
    facts = environment()
    torch_version = f"torch {facts['packages']['torch']}"
    sizes = [facts["system"], f"{facts['cores']} cores", f"{facts['threads']} threads", torch_version]
    return ", ".join([*sizes, *facts["cpu_features"], *facts["devices"]])


def _cells(entry: Mapping[str, Any]) -> list[str]:
    model, measured = entry["model"], entry["measured"]
    kind = "" if model["kind"] == "transformer-xl" else f"{model['kind']}, "
    memory = entry["memory_bytes"]
    return [
        entry["name"],
        f"{kind}{model['n_layer']} layers of {model['d_model']}",
        f"{entry['data'] or 'your text'}, {entry['unit']}s",
        f"{entry['parameters']:,}" if entry["parameters"] else "by the text",
        "-" if memory is None else f"{memory / 1e9:,.1f}",
        f"{entry['steps']:,}",
        f"{measured['seconds_per_step']:.3g}" if measured else "-",
        clock(entry["seconds"]) if measured else "-",
        entry["published"] or "-",
        entry["own"] or "-",
    ]
