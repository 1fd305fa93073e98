"""Read a recipe (a TOML file) and the settings of a command line as a `RunConfig`, and write it as TOML.

A recipe has one table per section of `RunConfig`. The same rules check a file and the command line (`--section.field
value`). All mistakes in both are reported at once, one per line, with the most similar name for an unknown one.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import get_origin, get_type_hints

from ..mistake import Mistake, did_you_mean, printable
from .problems import Problems, WrongSettings, refuse_settings
from .settings import RunConfig, TrainConfig
from .shape import own_kinds
from .values import Hint, Value, as_float, fits, from_words, type_text, value_text

SECTIONS: dict[str, type] = get_type_hints(RunConfig)
TYPES = {f"{name}.{field}": hint for name, owner in SECTIONS.items() for field, hint in get_type_hints(owner).items()}
"""The type of each setting."""

ID_FILES = (".npy", ".npz", ".bin")
"""Suffixes of files of token ids."""
_LENGTHS = ("tgt_len", "mem_len", "attn_len", "clamp_len", "context_len")
_DOTTED = re.compile(r"--([a-z][a-z_-]*\.[\w-]+)(?:=(.*))?", re.DOTALL)


def value_of(config: RunConfig, name: str) -> Value:
    """The value of a setting in a run."""
    section, _, field = name.partition(".")
    return getattr(getattr(config, section), field)


def is_open(config: RunConfig, name: str) -> bool:
    """Whether a run sets this value only when it begins: "auto", or a vocabulary size of 0."""
    return value_of(config, name) == (0 if name == "model.vocab_size" else "auto")


def packaged_recipes() -> dict[str, Path]:
    """The files of the packaged recipes, by name."""
    return {file.stem: file for file in sorted(Path(__file__).with_name("recipes").glob("*.toml"))}


def find_recipe(recipe: str) -> Path:
    """The file of a packaged recipe, or the TOML file at a path."""
    packaged, path = packaged_recipes(), Path(recipe)
    if recipe in packaged:
        return packaged[recipe]
    if path.is_file():
        return path
    inside = path / "config.toml"
    hint = f" Did you mean {inside}?" if inside.exists() else did_you_mean(recipe, packaged)
    raise FileNotFoundError(f"RECIPE must be a TOML file or one of {', '.join(packaged)}, got {recipe!r}.{hint}")


def recipe_identity(recipe: str) -> str:
    """The text by which a run records its recipe: the name of a packaged one; for a file, its name and checksum."""
    path = find_recipe(recipe)
    if path == packaged_recipes().get(recipe):
        return recipe
    return f"{path.name} (SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]})"


def load_recipe(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    data: str | Path | None = None,
    note: Callable[[str], None] | None = None,
) -> RunConfig:
    """Read a recipe, by name or path, and apply the command line's settings.

    Args:
        overrides: words of a command line, `--section.field value ...`. If a setting occurs twice, the last one counts.
            A length given for `train` also applies to `eval`, unless it is given for `eval` too. Settings of the recipe
            that do not apply to another `model.kind` or `train.mem_len` are left out.
        data: a text file, a folder or the name of a corpus, to train on instead of the recipe's corpus.
        note: called with a sentence about what is left out, and about what is added; by default each is printed on
            standard error.

    Raises:
        FileNotFoundError: there is no such recipe.
        Mistake: a line for each mistake in the file and on the command line.
    """
    if not isinstance(overrides, Sequence) or isinstance(overrides, str):
        raise Mistake(
            f"overrides must be a list of words, as on a command line, got {type(overrides).__name__}. Write "
            '["--train.lr", "1e-3"].'
        )
    path = find_recipe(str(recipe))
    try:
        tables = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise Mistake(f"Recipe {recipe} is not valid TOML: {error}.") from error
    own = settings_of(tables)
    sentences = own.get("corpus.newlines") == "sentence"
    defaults = {} if data is None else data_settings(str(data), sentences=sentences)
    return run_of(own | defaults, overrides, adapt=note or _say)


def _say(sentence: str) -> None:
    print(f"txl: {printable(sentence)}", file=sys.stderr)


def unsaid(sentence: str) -> None:
    """Do not print a note of `load_recipe`, because another call prints it."""


def _lengths_that_follow(chosen: Mapping[str, Value], named: Collection[str]) -> list[str]:
    """The lengths of evaluation that are those of training, because a command line changes these and not the lengths of
    evaluation: the recipe's would be those of another model. A recipe's short segments are for its memory."""
    names = [name for name in _LENGTHS if f"train.{name}" in named]
    if "mem_len" in names:
        names += ["attn_len", "clamp_len", "context_len"] + ["tgt_len"] * (chosen["train.mem_len"] == 0)
    return [f"eval.{name}" for name in dict.fromkeys(names) if f"eval.{name}" not in named]


def data_settings(data: str, *, sentences: bool = False) -> dict[str, Value]:
    """The settings that `--data` implies: the text, with line ends kept and a vocabulary size that follows the text.
    For token ids they include the unit.

    For a corpus given by its name, and for `sentences`, the recipe sets the treatment of line ends.
    """
    settings = {"corpus.name": text_name(data), "model.vocab_size": 0}
    if Path(data).exists() and not (sentences and not holds_ids(Path(data))):
        settings["corpus.newlines"] = "keep"
    if holds_ids(Path(data)):
        settings["corpus.unit"] = "id"
    return settings


def holds_ids(path: Path) -> bool:
    """Whether a path is a file of token ids, or a folder with a training split of ids that is no token store."""
    if path.is_dir() and not (path / "corpus.json").exists():
        return any((path / f"train{suffix}").is_file() for suffix in ID_FILES)
    return path.is_file() and path.suffix in ID_FILES


def chosen_settings(recipe: str | None, overrides: Sequence[str], data: str | None) -> list[str]:
    """The names of the settings that `--init` must not contradict: all of `overrides`, the unit of token ids in `data`,
    and the unit and line ends of a recipe that the user named, unless `data` replaces them."""
    defaults = {} if data is None else data_settings(data)
    own = {} if recipe is None else {"corpus.unit": None, "corpus.newlines": None}
    given = own | defaults | parse_overrides(overrides)
    return [name for name in given if name == "corpus.unit" or (name, given[name]) not in defaults.items()]


def text_name(data: str) -> str:
    """The absolute path of a text, so a run's `config.toml` works in any folder. The name of a corpus is unchanged."""
    path = Path(data)
    return str(path.resolve()) if data and (path.is_file() or path.is_dir()) else data


def changed_settings(config: RunConfig, overrides: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """`config` with the settings of a command line, and the names of those that this changed."""
    changed = run_of(settings_in(config), overrides)
    return changed, [name for name in parse_overrides(overrides) if value_of(config, name) != value_of(changed, name)]


def settings_in(config: RunConfig) -> dict[str, Value]:
    """All settings of a run."""
    return {name: value_of(config, name) for name in TYPES}


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into `--section.field value ...` words and all others, each in their order.

    A list takes all words up to the next option. A switch takes only true or false, so `--train.compile enwik8-small`
    does not take the name of the recipe.
    """
    overrides: list[str] = []
    others: list[str] = []
    for name, _, words in _by_setting(arguments):
        (overrides if name else others).extend(words)
    return overrides, others


def parse_overrides(overrides: Sequence[str], problems: list[str] | None = None) -> dict[str, Value]:
    """The settings in the words `--section.field value ...` of a command line, of which the last counts if a setting
    occurs twice. Mistakes are added to `problems`."""
    given: dict[str, Value] = {}
    problems = [] if problems is None else problems
    for name, values, words in _by_setting(overrides):
        hint = TYPES.get(name)
        if not name:
            problems.append(f"{words[0]} is neither a setting nor a value of one. Leave it out.")
        elif hint is None:
            problems.append(_unknown(name))
        elif not values and hint is not bool:
            problems.append(f"{name} needs a value: it must be {type_text(hint)}.")
        else:
            given[name] = from_words(values, hint) if values else True
    return given


def _by_setting(arguments: Sequence[str]) -> Iterator[tuple[str, Sequence[str], Sequence[str]]]:
    """The words in groups: a setting's name, the words of its value, and all its words; for any other word no name."""
    position = 0
    while position < len(arguments):
        match, end = _DOTTED.fullmatch(arguments[position]), position + 1
        name = match[1].replace("-", "_") if match else ""
        if match and match[2] is None:
            end += _count_values(TYPES.get(name), arguments[end:])
        words = arguments[position:end]
        yield name, [match[2]] if match and match[2] is not None else words[1:], words
        position = end


def _count_values(hint: Hint, following: Sequence[str]) -> int:
    """Number of words after an option of this type that are its value."""
    free = next((i for i, word in enumerate(following) if word.startswith("--")), len(following))
    if hint is bool:
        return int(free > 0 and following[0].lower() in ("true", "false"))
    return free if get_origin(hint) is tuple else min(free, 1)


def write_toml(config: RunConfig) -> str:
    """The recipe of exactly `config`. Settings that are None are left out, because TOML has no null."""
    lines: list[str] = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for field, value in vars(getattr(config, section)).items():
            if value is not None:
                lines.append(f"{field} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Value) -> str:
    """A value as TOML. JSON is TOML, except that TOML also requires an escape for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def settings_of(tables: Mapping[str, Value]) -> dict[str, Value]:
    """The settings of a recipe. `run_of` refuses those without a field: values outside of tables, and tables that are
    empty and unknown."""
    given: dict[str, Value] = {}
    for section, table in tables.items():
        fields = table if isinstance(table, dict) and (table or section in SECTIONS) else {"": table}
        given |= {f"{section}.{field}": value for field, value in fields.items()}
    return given


def run_of(
    settings: Mapping[str, Value], overrides: Sequence[str], *, adapt: Callable[[str], None] | None = None
) -> RunConfig:
    """The run with these settings, named `section.field`, and the ones of a command line, which replace them.

    Types are checked first, then the values in each section, then the sections together.

    Args:
        adapt: if given, `settings` are fitted to the command line's kind and lengths, and it is called with sentences
            that name what is left out and added.

    Raises:
        Mistake: a line for each mistake.
    """
    problems = Problems()
    asked = parse_overrides(overrides, problems)
    chosen: dict[str, Value] = {"model.vocab_size": 0}
    for name, given in {**settings, **asked}.items():
        hint = TYPES.get(name)
        value = tuple(given) if isinstance(given, list) else given
        if hint is None:
            problems.append(_unknown(name))
        elif fits(value, hint):
            chosen[name] = as_float(value, hint)
        else:
            problems.append(f"{name} must be {type_text(hint)}, got {value_text(given)}.")
    problems.refuse()
    if adapt is None:
        return _build(chosen)
    notes = _adapt(chosen, {*asked})
    config = _build(chosen)
    for note in notes:
        adapt(note)
    return config


def _build(chosen: Mapping[str, Value]) -> RunConfig:
    """The run with these settings, by `section.field`. `WrongSettings` names what is wrong in all sections."""
    sections, wrong = {}, []
    for section, owner in SECTIONS.items():
        own = {name.removeprefix(f"{section}."): chosen[name] for name in chosen if name.startswith(f"{section}.")}
        try:
            sections[section] = owner(**own)
        except WrongSettings as error:
            wrong += error.inside(section)
    refuse_settings(wrong)
    return RunConfig(**sections)


def _adapt(chosen: dict[str, Value], named: set[str]) -> list[str]:
    """Leave out of `chosen` what does not apply to a kind or a memory length that the command line named, and the
    lengths of evaluation that follow those of training; give positions as many vectors as training reaches. Return
    sentences that say so. What the command line names itself stays, and is refused later."""
    left_out = {name: chosen.pop(name) for name in _lengths_that_follow(chosen, named) if name in chosen}
    changes = named & {"model.kind", "train.tgt_len", "train.mem_len", "train.context_len"}
    added = _positions_of(chosen) if changes and "model.positions" not in named else {}
    added = {name: value for name, value in added.items() if chosen.get(name) != value}
    chosen |= added
    causes = (named & {"model.kind", "train.mem_len"}) | set(added)
    while causes:
        try:
            _build(chosen)
            break
        except WrongSettings as error:
            fields = [name for each in error.problems if causes & {*each.fields} for name in each.fields]
        removed = [name for name in dict.fromkeys(fields) if name in chosen and name not in named | causes]
        if "model.kind" not in named:  # a memory changes other lengths alone
            removed = [name for name in removed if name.endswith("_len")]
        if not removed:
            break
        left_out |= {name: chosen.pop(name) for name in removed}
        causes |= set(removed)  # the settings of n-grams go with the n-grams
    changed = {"Left out, because these settings of the recipe do not fit yours": left_out, "Added": added}
    listed = {
        what: [f"{name} = {_toml_value(value)}" for name, value in values.items() if value is not None]
        for what, values in changed.items()
    }
    return [f"{what}: {', '.join(known)}." for what, known in listed.items() if known]


def _positions_of(chosen: Mapping[str, Value]) -> dict[str, Value]:
    """The number of learned positions or distances that training reaches, for a kind that has them."""
    kind = own_kinds.get(chosen.get("model.kind", ""), chosen.get("model.kind"))
    if kind not in ("shaw", "al-rfou"):
        return {}
    names = ["tgt_len", "context_len"] + ["mem_len"] * (kind == "shaw")
    reached = sum(chosen.get(f"train.{name}", getattr(TrainConfig, name)) for name in names)
    return {"model.positions": reached} if reached > 0 else {}


def _unknown(name: str) -> str:
    """The sentence for an unknown setting. It suggests the same name in another section, or the most similar one."""
    elsewhere = [other for other in TYPES if other.partition(".")[2] == name.partition(".")[2]]
    near = elsewhere or get_close_matches(name, TYPES, n=1, cutoff=0.75)
    meant = f"did you mean {near[0]}?" if near else "`txl train --help` lists them all."
    return f"{name.removesuffix('.')} is not a setting; {meant}"
