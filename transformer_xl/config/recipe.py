"""From a recipe (a TOML file) and what the command line adds to it, to a `RunConfig`, and back to TOML.

A recipe has one table per section of `RunConfig`. The same rules check a file and the command line (`--section.field
value`). All mistakes in both are reported at once, a line each, with the name that was probably meant.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from ..mistake import Mistake
from .problems import Problem, Problems
from .settings import GONE, RunConfig
from .values import fits, from_words, listed, shown, wanted, widened

SECTIONS: dict[str, type] = get_type_hints(RunConfig)
HINTS: dict[str, dict[str, Any]] = {section: get_type_hints(owner) for section, owner in SECTIONS.items()}
"""For each section of a run: its settings and their types."""

DOTTED = re.compile(r"--(?P<section>[a-z][a-z_-]*)\.(?P<field>[\w-]+)(?:=(?P<value>.*))?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting that a user gave; `label` is its name as the user wrote it, `source` the file."""

    section: str
    field: str
    value: Any
    label: str
    source: str


def packaged_recipes() -> dict[str, Path]:
    """The recipes that come with the package: name to file."""
    folder = Path(__file__).with_name("recipes")
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def find_recipe(recipe: str) -> Path:
    """The file of a packaged recipe by its name, or the TOML file at that path."""
    packaged = packaged_recipes()
    path = Path(recipe)
    if recipe in packaged:
        return packaged[recipe]
    if path.is_dir():
        hint = f" Did you mean {path / 'config.toml'}?" if (path / "config.toml").exists() else ""
        raise IsADirectoryError(f"RECIPE must be a name or a TOML file, and {recipe} is a folder.{hint}")
    if path.is_file():
        return path
    if path.exists():
        raise Mistake(f"RECIPE must be a name or a TOML file, and {recipe} is a pipe or a device. Save it in a file.")
    names = ", ".join(packaged)
    if path.suffix == ".toml" or path.name != recipe:
        raise FileNotFoundError(f"There is no recipe file {recipe}. Give the path of a TOML file, or a name: {names}.")
    close = get_close_matches(recipe, packaged, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise FileNotFoundError(f"There is no recipe {recipe!r}.{hint} There are {names}; or give the path of a TOML file.")


def recipe_identity(recipe: str) -> str:
    """The recipe as a run records it: the name of a packaged one; for a file its name and its checksum."""
    path = find_recipe(recipe)
    if path == packaged_recipes().get(recipe):
        return recipe
    return f"{path.name} (SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]})"


def load_recipe(recipe: str | Path, overrides: Sequence[str] = (), *, defaults: Sequence[Setting] = ()) -> RunConfig:
    """Read a recipe, by name or path, and apply the command line's settings.

    Args:
        overrides: words of a command line, `--section.field value ...`; the last one wins.
        defaults: settings that replace the recipe's; `overrides` replace them.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such recipe.
        Mistake: a line for each mistake in the file and on the command line.
    """
    path = find_recipe(str(recipe))
    name = str(recipe)
    try:
        tables = tomllib.loads(path.read_bytes().decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Mistake(f"Recipe {name} is not valid TOML: {error}.") from error
    except (ValueError, RecursionError) as error:  # of Python's limits, which tomllib leaves as they are
        raise Mistake(
            f"Recipe {name} must hold numbers of less than 4,300 digits and lists that are not hundreds of levels deep."
        ) from error
    problems = Problems()
    return _assemble([*_settings_of(tables, name, problems), *defaults], overrides, problems)


def data_settings(data: str) -> list[Setting]:
    """The settings that `--data` gives: the text, with its line ends and its own vocabulary size.

    For a corpus known by its name, the recipe says how line ends are treated.
    """
    given = {("corpus", "name"): text_name(data), ("model", "vocab_size"): 0}
    if Path(data).exists():
        given["corpus", "newlines"] = "keep"
    return [Setting(section, field, value, "--data", "") for (section, field), value in given.items()]


def given_settings(recipe: str, overrides: Sequence[str], defaults: Sequence[Setting]) -> list[Setting]:
    """The settings that the user chose and that `--init` may contradict: all of `overrides`, and the recipe's unit and
    line ends unless `defaults` replace them."""
    source = f" in recipe {recipe}"
    own = [Setting("corpus", field, None, f"corpus.{field}", source) for field in ("unit", "newlines")]
    last = {(s.section, s.field): s for s in (*own, *defaults, *parse_overrides(overrides, []))}
    return [setting for setting in last.values() if setting not in defaults]


def text_name(data: str) -> str:
    """An absolute path, so a run's `config.toml` works in any folder; the name of a corpus as it is."""
    return str(Path(data).resolve()) if data and Path(data).exists() else data


def changed_settings(config: RunConfig, overrides: Sequence[str]) -> tuple[RunConfig, list[Setting]]:
    """`config` with a command line's settings, and those settings that differ from before.

    Raises:
        Mistake: a line for each mistake.
    """
    changed = run_of(settings_in(config), overrides)
    given = parse_overrides(overrides, [])
    values = {(setting.section, setting.field): setting for setting in given}
    different = [
        setting
        for (section, field), setting in values.items()
        if getattr(getattr(config, section), field) != getattr(getattr(changed, section), field)
    ]
    return changed, different


def run_of(settings: Sequence[Setting], overrides: Sequence[str]) -> RunConfig:
    """The run of these settings and a command line's; of two settings with one name, the last one counts.

    Raises:
        Mistake: a line for each mistake.
    """
    return _assemble(settings, overrides, Problems())


def settings_in(config: RunConfig) -> list[Setting]:
    """Every setting of a run."""
    return [
        Setting(section, field, value, f"{section}.{field}", "")
        for section in SECTIONS
        for field, value in vars(getattr(config, section)).items()
    ]


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into `--section.field value ...` words and all others, each in their order.

    How many words belong to a setting follows from its type, so `--train.compile enwik8-small` leaves the recipe alone.
    """
    overrides: list[str] = []
    others: list[str] = []
    for match, words in _by_setting(arguments):
        (others if match is None else overrides).extend(words)
    return overrides, others


def parse_overrides(overrides: Sequence[str], problems: list[str]) -> list[Setting]:
    """The settings of a command line's `--section.field value ...` words; mistakes go to `problems`."""
    given: list[Setting] = []
    for match, words in _by_setting(overrides):
        if match is None:
            problems.append(f"{words[0]} is neither a setting nor a value of one. Leave it out.")
            continue
        label = words[0].split("=", 1)[0]
        values = words[1:] if match["value"] is None else [match["value"]]
        section, field, hint = _lookup(match)
        if hint is None:
            problems.append(_unknown(section, field, label, ""))
        elif not values and hint is not bool:
            problems.append(f"{label} needs a value: it must be {wanted(hint)}.")
        else:
            value = field == match["field"].replace("-", "_") if not values else from_words(values, hint)
            given.append(Setting(section, field, value, label, ""))
    return given


def _by_setting(arguments: Sequence[str]) -> Iterator[tuple[re.Match[str] | None, Sequence[str]]]:
    """Each dotted option with its match and the words of its value; every other word alone."""
    position = 0
    while position < len(arguments):
        match = DOTTED.fullmatch(arguments[position])
        values = _count_values(match, arguments[position + 1 :]) if match and match["value"] is None else 0
        end = position + 1 + values
        yield match, arguments[position:end]
        position = end


def write_toml(config: RunConfig) -> str:
    """A recipe that gives exactly `config`. TOML has no null, so settings that are None are left out."""
    lines: list[str] = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for field, value in vars(getattr(config, section)).items():
            if value is not None:
                lines.append(f"{field} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):  # TOML has JSON's escapes, but requires one for DEL, too
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _settings_of(tables: Mapping[str, Any], name: str, problems: list[str]) -> list[Setting]:
    """The settings of a recipe; unknown tables and values outside of tables go to `problems`."""
    given: list[Setting] = []
    for section, table in tables.items():
        if section in SECTIONS and isinstance(table, dict):
            given += [
                Setting(section, field, value, f"{section}.{field}", f" in recipe {name}")
                for field, value in table.items()
                if (section, field) not in GONE or value != GONE[section, field]
            ]
        elif section in SECTIONS:
            problems.append(f"{section} in recipe {name} must be a table, [{section}], got {shown(table)}.")
        elif isinstance(table, dict):
            close = get_close_matches(section, SECTIONS, n=1)
            known = listed(f"[{name}]" for name in SECTIONS)
            meant = f"did you mean [{close[0]}]?" if close else f"there are {known}."
            problems.append(f"[{section}] is not a section of recipe {name}; {meant}")
        else:
            problems.append(_unknown("", section, section, name))
    return given


def _assemble(settings: Sequence[Setting], overrides: Sequence[str], problems: Problems) -> RunConfig:
    """The run of these settings; raises one `Mistake` for `problems` and all others."""
    given = _fitting([*settings, *parse_overrides(overrides, problems)], problems)
    chosen: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    chosen["model"]["vocab_size"] = 0
    for setting in filter(None, given.values()):
        chosen[setting.section][setting.field] = setting.value
    sections = {
        section: problems.attempt(partial(owner, **chosen[section]), partial(_worded, given, section))
        for section, owner in SECTIONS.items()
    }
    if None in sections.values():
        problems.fail()
    config = problems.attempt(partial(RunConfig, **sections), partial(_worded, given, ""))
    if config is None:
        problems.fail()
    problems.attempt(lambda: config.eval_lengths, partial(_worded, given, "eval"))
    problems.refuse()
    return config


def _fitting(settings: Sequence[Setting], problems: list[str]) -> dict[str, Setting | None]:
    """The last setting of each dotted name; None if its value has the wrong type."""
    given: dict[str, Setting | None] = {}
    for setting in settings:
        name, hint = f"{setting.section}.{setting.field}", HINTS[setting.section].get(setting.field)
        value = tuple(setting.value) if isinstance(setting.value, list) else setting.value
        if hint is None:
            recipe = setting.source.removeprefix(" in recipe ")
            problems.append(_unknown(setting.section, setting.field, setting.label, recipe))
        elif fits(value, hint):
            given[name] = dataclasses.replace(setting, value=widened(value, hint))
        else:
            problems.append(f"{setting.label}{setting.source} must be {wanted(hint)}, got {shown(setting.value)}.")
            given[name] = None
    return given


def _worded(given: Mapping[str, Setting | None], section: str, problem: Problem) -> str:
    """The sentence of a problem of a section, with each setting named as the user wrote it.

    "" if one of the settings has the wrong type, because then its default was compared.
    """
    labels: list[str] = []
    for field in problem.fields:
        name = f"{section}.{field}" if section else field
        setting = given.get(name)
        unset = name not in given or (setting is not None and setting.value is None)
        if section == "eval" and unset and f"train.{field}" in given:  # [eval] inherits from [train]
            name = f"train.{field}"
            setting = given[name]
        if setting is None and name in given:
            return ""
        if not labels:
            labels.append(f"{setting.label}{setting.source}" if setting else name)
        else:
            labels.append(setting.label if setting and setting.label.startswith("--") else field)
    return problem.sentence.format(*labels)


def _lookup(match: re.Match[str]) -> tuple[str, str, Any]:
    """Section, field and type of a dotted option; `--train.no-compile` is the field `compile`. No type: unknown."""
    section, field = match["section"].replace("-", "_"), match["field"].replace("-", "_")
    hints = HINTS.get(section, {})
    if field not in hints and field.startswith("no_") and hints.get(field[3:]) is bool and match["value"] is None:
        field = field[3:]
    return section, field, hints.get(field)


def _count_values(match: re.Match[str], following: Sequence[str]) -> int:
    """Number of words after a dotted option that are its value."""
    _, field, hint = _lookup(match)
    free = 0
    while free < len(following) and not following[free].startswith("--"):
        free += 1
    if hint is bool:
        negated = field != match["field"].replace("-", "_")
        return int(not negated and free > 0 and following[0].lower() in ("true", "false"))
    if get_origin(hint) is tuple:
        sizes = get_args(hint)
        if Ellipsis in sizes:
            return next((i for i, word in enumerate(following[:free]) if _ends_list(word, hint)), free)
        return min(free, 1 if free and "," in following[0] else len(sizes))
    return min(free, 1)


def _ends_list(word: str, hint: Any) -> bool:
    """Whether a word is a recipe or a path, and not a value of the list before it."""
    if all(fits(value, get_args(hint)[0]) for value in from_words([word], hint)):
        return False
    return word in packaged_recipes() or word.endswith(".toml") or Path(word).exists()


def _unknown(section: str, field: str, label: str, recipe: str) -> str:
    """The sentence for a setting that does not exist, with the most similar one that does."""
    of = f" of recipe {recipe}" if recipe else ""
    prefix = "--" if label.startswith("--") else ""
    near = next(_nearest(section, field), None)
    if near is None:
        return f"{label} is not a setting{of}; `txl train --help` lists them all."
    meant = f"{prefix}{near}".replace("_", "-") if prefix else near
    return f"{label} is not a setting{of}; did you mean {meant}?"


def _nearest(section: str, field: str) -> Iterator[str]:
    """Dotted names of similar settings: first in its section, then in the section that was meant, or in any."""
    field = field.replace("-", "_")
    for close in get_close_matches(field, HINTS.get(section, {}), n=1, cutoff=0.6):
        yield f"{section}.{close}"
    for owner in get_close_matches(section, HINTS, n=1) if section not in HINTS else HINTS:
        yield from (f"{owner}.{close}" for close in get_close_matches(field, HINTS[owner], n=1, cutoff=0.8))
