"""`txl recipes`: every recipe with its size, its needs and its results."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from ..config import recipe as recipes
from ..config.settings import RunConfig
from ..runtime.terminal import show_table


@dataclass(frozen=True)
class Recipes:
    """List the recipes: model, data, parameters, steps, results."""

    names: Annotated[
        Positional[tuple[str, ...]], arg(metavar="RECIPE ...", help="By default all packaged recipes.")
    ] = ()
    json: bool = False
    """Print one JSON object."""

    def run(self) -> None:
        """Print a row for each recipe, or for the ones named."""
        names, results = self.names or tuple(recipes.packaged_recipes()), read_results()
        entries = [recipe_facts(name, with_vocabulary(recipes.load_recipe(name)), results) for name in names]
        if self.json:
            print(json.dumps({"recipes": entries}))
            return
        columns = ["recipe", "model", "data", "parameters", "steps", "published", "ours"]
        show_table("`txl train RECIPE` trains one.", columns, [*map(_cells, entries)])


def with_vocabulary(config: RunConfig) -> RunConfig:
    """The recipe with its vocabulary size if that can be known: all bytes of any text, or of a prepared corpus."""
    from ..data.datasets import store_of
    from ..data.header import Header

    if config.model.vocab_size:
        return config
    store = store_of(config.corpus.name) if config.corpus.name else None
    size = Header.read(store / "corpus.json").vocab_size if store else 0
    if not config.corpus.name and config.corpus.unit == "byte":
        size = 256
    return replace(config, model=replace(config.model, vocab_size=size))


def recipe_facts(name: str, config: RunConfig, results: Mapping[str, Any]) -> dict[str, Any]:
    """The facts about a recipe. None: not known."""
    model = config.model
    return {
        "name": name,
        "model": {"kind": model.kind, "n_layer": model.n_layer, "d_model": model.d_model},
        "data": config.corpus.name,
        "unit": config.corpus.unit,
        "parameters": count_parameters(config) if model.vocab_size else None,
        "steps": config.train.max_steps,
        **{what: results.get(name, {}).get(what) for what in ("published", "own")},
    }


def count_parameters(config: RunConfig) -> int:
    """The exact number of parameters, tied ones once. Nothing is allocated."""
    import torch

    from ..model.baselines import build_model

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(config.model).parameters())


def read_results() -> dict[str, Any]:
    """The published and own test results of the packaged recipes, as text."""
    from ..paper.exhibits import published

    own = tomllib.loads(Path(recipes.__file__).with_name("results.toml").read_text(encoding="utf-8"))
    return {recipe: {"published": figure} for recipe, figure in published().items()} | own


def _cells(entry: Mapping[str, Any]) -> list[str]:
    model = entry["model"]
    kind = "" if model["kind"] == "transformer-xl" else f"{model['kind']}, "
    return [
        entry["name"],
        f"{kind}{model['n_layer']} layers of {model['d_model']}",
        f"{entry['data'] or 'your text'}, {entry['unit']}s",
        f"{entry['parameters']:,}" if entry["parameters"] else "by the text",
        f"{entry['steps']:,}",
        entry["published"] or "-",
        entry["own"] or "-",
    ]
