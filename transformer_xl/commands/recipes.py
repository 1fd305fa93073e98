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
from ..paper.exhibits import published
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
        names, results = self.names or tuple(recipes.packaged_recipes()), read_results()
        entries = [recipe_facts(name, results) for name in names]
        if self.json:
            print(json.dumps({"recipes": entries}))
            return
        columns = ["recipe", "model", "data", "parameters", "steps", "published", "ours"]
        show_table("`txl train RECIPE` trains one.", columns, [*map(_cells, entries)])


def recipe_facts(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """The facts about a recipe. None: not known."""
    from ..data.corpus import Header
    from ..data.datasets import store_of
    from ..model.baselines import count_parameters

    config = recipes.load_recipe(name)
    size, store = config.model.vocab_size, store_of(config.corpus.name) if config.corpus.name else None
    if not size and store:
        size = Header.read(store / "corpus.json").vocab_size
    elif not size and not config.corpus.name and config.corpus.unit == "byte":
        size = 256  # all bytes of any text
    model = replace(config.model, vocab_size=size)
    return {
        "name": name,
        "model": {"kind": model.kind, "n_layer": model.n_layer, "d_model": model.d_model},
        "data": config.corpus.name,
        "unit": config.corpus.unit,
        "parameters": count_parameters(model) if size else None,
        "steps": config.train.max_steps,
        **{what: results.get(name, {}).get(what) for what in ("published", "own")},
    }


def read_results() -> dict[str, Any]:
    """The published and own test results of the packaged recipes, as text."""
    own = tomllib.loads(Path(recipes.__file__).with_name("results.toml").read_text(encoding="utf-8"))
    results: dict[str, Any] = {recipe: {"published": figure} for recipe, figure in published().items()}
    for recipe, figures in own.items():
        results[recipe] = results.get(recipe, {}) | figures
    return results


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
