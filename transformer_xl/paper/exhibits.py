"""What the paper shows: its tables and figures, and for each row the words of `txl train` that make its model.

`exhibits.toml` has all of it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from ..config.recipe import load_recipe, split_overrides, unsaid
from ..config.settings import RunConfig
from ..mistake import Mistake

SIZES = ("toy", "small", "paper")
AL_RFOU = "al-rfou-auxiliary"
"""The kind of `al_rfou.py`, which a command knows where TXL_IMPORT names that file."""
Result = dict[str, Any]
"""The content of result.json: row, seed, settings, unit, test and valid figure, parameters, and what was measured."""


@dataclass(frozen=True)
class Line:
    """A line of a table."""

    cells: Sequence[object]
    paper: Sequence[object]
    """The paper's figures; "-" where it has none."""
    row: str = ""
    """The name of the model, or "" if the line needs none."""


@dataclass(frozen=True)
class Exhibit:
    """A table, a figure or an appendix."""

    name: str
    title: str
    home: str
    """The exhibit whose models and measures it shares, or its own name."""
    measure: str = ""
    """What is measured, a key of `measures.MEASURES`; "" for what only a page of the documentation shows."""
    columns: Sequence[str] = ()
    published: Sequence[str] = ()
    """What the paper's figures are."""
    lines: Sequence[Line] = ()
    claims: Sequence[Sequence[Any]] = ()
    """What the paper concludes, the row that is better, the other row, and where they are compared: at this multiple of
    the trained length; without it, each at its best."""
    page: str = ""
    split: str = "test"
    """The split that the paper's size is scored on at several lengths."""

    def rows(self, named: tuple[str, ...] = (), size: str | None = None) -> list[str]:
        """The models that it needs, or those of them that are `named`; with a `size` those that exist at it.

        Raises:
            Mistake: a name is none of them.
        """
        known = list(dict.fromkeys(line.row for line in self.lines if line.row))
        if named and not known:
            raise Mistake(f"--rows must be left out for {self.name}, which trains no models.")
        for name in named:
            if name not in known:
                raise Mistake(f"--rows must be some of {', '.join(known)} for {self.name}, got {name!r}.")
        wanted = [name for name in known if not named or name in named]
        return [name for name in wanted if size is None or training(name, size)]


@cache
def content() -> dict[str, Any]:
    """`exhibits.toml`."""
    return tomllib.loads(Path(__file__).with_name("exhibits.toml").read_text(encoding="utf-8"))


def exhibits() -> dict[str, Exhibit]:
    """Everything the paper shows, by name. An exhibit with `same` takes all but the title from the one named there."""
    found = {}
    for name, table in content().items():
        if name not in ("sizes", "words", "rows"):
            home = table.get("same", name)
            facts = dict(content()[home])
            lines = [Line(**row) for row in facts.pop("rows", ())]
            found[name] = Exhibit(**facts | {"name": name, "title": table["title"], "home": home, "lines": lines})
    return found


def training(row: str, size: str) -> list[str] | None:
    """The words of `txl train` for a row, without seed and folder; None if the row does not exist at this size.

    {text} and {sentences} are left as they are.
    """
    facts, sizes, words = content()["rows"][row], content()["sizes"][size], content()["words"]
    begin = sizes.get(facts["base"], sizes["ablation"]) if "base" in facts else facts.get(size)
    if begin is None:
        return None
    end = facts.get(size, "") if "base" in facts else ""
    text = " ".join([begin, facts.get("change", ""), end])
    for name, value in words.items():
        text = text.replace(f"{{{name}}}", str(value))
    return [*text.split()]


def published() -> dict[str, str]:
    """The paper's first figure of each row that is a packaged recipe as it is, with its unit."""
    found = {}
    for exhibit in exhibits().values():
        for line in exhibit.lines:
            words = training(line.row, "paper") if line.row and exhibit.measure in ("score", "lengths") else None
            if words and len(words) == 1 and line.paper[0] != "-":
                found.setdefault(words[0], f"{line.paper[0]} {exhibit.published[0].split(',')[0]}")
    return found


def rows_of(config: RunConfig, recipe: str) -> list[str]:
    """The rows whose model a run of a packaged recipe is, at the paper's size or in the ablations of the small one: of
    the same recipe, text, kind, widths, loss and lengths."""
    found = []
    for row, size in product(content()["rows"], ("paper", "small")):
        words = training(row, size) if size == "paper" or "base" in content()["rows"][row] else None
        if words and words[0] == recipe and (AL_RFOU in words) == (config.model.kind == AL_RFOU):
            own = load_recipe(recipe, split_overrides(words[1:])[0], note=unsaid)
            if "--data" not in words and _identity(own) == _identity(config):
                found.append(row)
    return found


def _identity(config: RunConfig) -> tuple[object, ...]:
    model, train = config.model, config.train
    sizes = model.n_layer, model.d_model, model.d_inner
    return config.corpus.name, model.kind, *sizes, train.loss, train.tgt_len, train.mem_len


def first_like(row: str, size: str) -> str:
    """The first row that is trained by the same words, because it is the same model."""
    own = training(row, size) if row in content()["rows"] else None
    return next((name for name in content()["rows"] if own and training(name, size) == own), row)
