"""The settings of a page's runs: those that differ, from the recipe or between runs, and all others."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from ..config.recipe import load_recipe, packaged_recipes, settings_in, write_toml
from .record import Record, last_part
from .summary import UNKNOWN
from .tables import Row, Table

Sections = dict[str, list[tuple[str, str]]]
"""Names and values by section."""


class Settings(NamedTuple):
    """Facts about runs for the template."""

    note: str
    differing: Table | None
    others: Sections | Table | None
    recipe: bool = True
    """Whether the runs are compared, with a recipe or with each other."""


def compare(records: Sequence[Record]) -> Settings:
    """The settings of one run beside its recipe, or of several runs side by side."""
    if len(records) > 1:
        return _side_by_side([_flat(record.config) for record in records], records, "settings")
    [record] = records
    own, name = _flat(record.config), str(record.environment.get("recipe") or "")
    if not own:
        return Settings("", None, None)
    if name not in packaged_recipes():
        unknown = f"The recipe was the file {name}." if name else "The run does not name its recipe."
        return Settings(f"{unknown} These are all settings.", None, _by_section(own), False)
    recipe, open_names = _recipe(name)
    every = dict.fromkeys([*own, *recipe])
    rows = [
        Row([key, own.get(key, "none"), recipe.get(key, "none")])
        for key in every
        if own.get(key, "none") != recipe.get(key, "none") and key not in open_names
    ]
    shown = {row.cells[0] for row in rows}
    others = _by_section({key: value for key, value in own.items() if key not in shown})
    note = f"The recipe is {name}. {'' if rows else 'Every setting is as in the recipe.'}{_version_note(record)}"
    return Settings(note, Table(["", "this run", "recipe"], rows) if rows else None, others)


def environments(records: Sequence[Record]) -> Settings:
    """The versions and machines of the runs."""
    flat = [_flat(record.environment) for record in records]
    if len(records) > 1:
        return _side_by_side(flat, records, "facts")
    return Settings("", None, _by_section(flat[0]) or None)


@cache
def _recipe(name: str) -> tuple[dict[str, str], set[str]]:
    """The settings of a packaged recipe, and the names of those that a run chooses when it begins."""
    config = load_recipe(name)
    chosen = {f"{each.section}.{each.field}" for each in settings_in(config) if each.open_in(config)}
    return _flat(tomllib.loads(write_toml(config))), chosen


def _version_note(record: Record) -> str:
    """A sentence if the run was made by another version, whose recipe may have been another."""
    from .. import __version__

    packages = record.environment.get("packages")
    made = packages.get("transformer-xl") if isinstance(packages, dict) else None
    if not isinstance(made, str) or made == __version__:
        return ""
    return f" It was trained with version {made}; this is the recipe of version {__version__}."


def _side_by_side(flat: Sequence[dict[str, str]], records: Sequence[Record], what: str) -> Settings:
    """A table of what differs between the runs, and one of what does not."""
    names = dict.fromkeys(name for values in flat for name in values)
    rows = [Row([name, *(values.get(name, UNKNOWN) for values in flat)]) for name in names]
    columns = ["", *(record.name for record in records)]
    differ = [row._replace(class_="differs") for row in rows if len(set(row.cells[1:])) > 1]
    alike = [row for row in rows if len(set(row.cells[1:])) == 1]
    note = "" if differ or not rows else f"All {what} of the runs are equal."
    return Settings(note, Table(columns, differ) if differ else None, Table(columns, alike) if alike else None)


def _by_section(values: dict[str, str]) -> Sections:
    sections: Sections = {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, []).append((key, value))
    return sections


def _flat(facts: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings by dotted name, as people write them."""
    found: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = _word(value)
    return found


def _word(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_word, value)) or "none"
    if value is None or value == "":
        return "none"
    return str(value).lower() if isinstance(value, bool) else last_part(str(value))
