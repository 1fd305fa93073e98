"""The mistakes in command lines of `txl` from which experiments/odd.py draws.

Options come from the dataclasses of the commands and settings from the dataclasses of a recipe, so new ones are
included automatically. Files come from the test folder ("world") of odd.py. Each class of mistakes is a function that
returns all of its cases; their values are random.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shlex
import shutil
import socket
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tyro.conf import Positional

from transformer_xl.cli.options import COMMANDS, Analyse
from transformer_xl.config.recipe import HINTS

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from mangled import ODD_TEXTS, mangled

LINES = """
train dish.toml --data story.txt --out fresh
train dish.toml --data shelf --out fresh
train dish.toml --data depot --out fresh
train dish.toml --data story.txt --out fresh --corpus.unit word --corpus.vocab lexicon.txt
train dish.toml --out alpha --resume --train.max-steps 4
train dish.toml --data story.txt --out fresh --init alpha
eval alpha
eval alpha --data story.txt --json
eval alpha --data depot --dump scores.npz
eval alpha --dynamic rms --dynamic-tokens 50 --max-tokens 60
score alpha story.txt
score beta - --json
generate alpha --max-tokens 3 --seed 1
generate alpha --max-tokens 3 --prompt @opening.txt --json
generate beta --max-tokens 3 --prompt @opening.txt
generate beta --max-tokens 3 --prompt -
analyse recl alpha --step 5 --max-context 10 --positions 10 --out figures
analyse length alpha --attn-len 3 --data story.txt --out figures
analyse attention alpha --max-tokens 50 --out figures
report alpha --out page.html
report alpha beta --out page.html
convert alpha --to fresh --to-format huggingface
convert alpha --to fresh --to-format original
convert legacy --from original --to fresh
convert hugged --from huggingface --to fresh
data ptb --source shelf
bench alpha --seconds 0.01 --repeats 1
demo --minutes 0
env --json
"""
REFUSED = ("data", "demo")
"""Commands whose lines are always refused: one accepts published names only, the other takes minutes."""
TARGETS = {"--out", "--to", "--dump"}
"""Options that name an output."""
LONG = {"minutes", "max_steps", "seconds", "repeats", "max_tokens", "dynamic_tokens"}
"""Options with large values that mean much work and are not mistakes."""
WORLD = ("story.txt", "shelf", "depot", "dish.toml", "lexicon.txt", "opening.txt", "alpha", "beta")
WORLD = (*WORLD, "legacy", "hugged")
Change = Callable[[Path], object]
"""A change of the world, the folder in which a command runs."""


@dataclass(frozen=True)
class Line:
    """A correct command line: its first words, and its options."""

    words: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, line: str) -> Line:
        words: list[str] = []
        options: dict[str, tuple[str, ...]] = {}
        for word in shlex.split(line):
            if word.startswith("--"):
                options[last := word] = ()
            elif options:
                options[last] += (word,)
            else:
                words.append(word)
        return cls(tuple(words), options)

    @property
    def owner(self) -> str:
        return " ".join(self.words[: 2 if self.words[0] == "analyse" else 1])

    @property
    def arguments(self) -> list[str]:
        return [*self.words, *chain.from_iterable([name, *values] for name, values in self.options.items())]

    @property
    def reads(self) -> list[str]:
        """The files and folders of the world that the command line names, each at the end of a word."""
        named = [name for name in WORLD if any(word.removeprefix("@") == name for word in self.arguments)]
        return [*named, *(["story.txt"] if self.own_text else [])]

    @property
    def own_text(self) -> bool:
        """Whether the command reads the training text of a run without an option for it."""
        return self.owner in ("train", "eval", "analyse recl", "analyse attention") and "--data" not in self.options

    def having(self, option: str, *values: str) -> Line:
        return replace(self, options={**self.options, option: values})

    def naming(self, old: str, new: str) -> Line:
        """The command line with another name for a file."""

        def renamed(word: str) -> str:
            return new if word == old else f"@{new}" if word == f"@{old}" else word

        options = {name: tuple(map(renamed, values)) for name, values in self.options.items()}
        return Line(tuple(map(renamed, self.words)), options)


RIGHT = [Line.of(line) for line in LINES.strip().splitlines()]


AT_THE_START = ("PYTHON", "LC_", "LANG", "OMP_", "CUDA_")
"""Prefixes of the variables that the interpreter or torch read when they start."""


@dataclass(frozen=True)
class Case:
    """A command line with one mistake, and its expected outcome."""

    what: str
    line: Line
    group: str
    """Cases of a class are drawn from its groups in turn."""
    arguments: list[str] = field(default_factory=list)
    """The whole command line; empty means `line`."""
    names: tuple[str, ...] = ()
    """A refusal must contain one of these; if there are none, any sentence is accepted."""
    before: Change | None = None
    later: Change | None = None
    """A change that is made after the command has printed something."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    streams: Mapping[str, str] = field(default_factory=dict)
    pty: tuple[int, int] | None = None
    file_limit: int | None = None
    """Maximum number of bytes in a file, to simulate a full disk."""
    gone: bool = False
    """Whether the working folder is removed."""
    refuse: bool = False
    """Whether the command has to fail."""
    notice: bool = False
    """Whether status 0 requires a sentence that contains one of `names`."""

    @property
    def command(self) -> list[str]:
        return self.arguments or self.line.arguments

    @property
    def real(self) -> bool:
        """Whether a case needs a new interpreter instead of a forked process."""
        return bool(self.streams) or any(name.startswith(AT_THE_START) for name in self.environment)


def kinds(hint: Any) -> set[Any]:
    """The plain types that an option takes: int for `tuple[int | None, ...]`."""
    if get_origin(hint) is Literal:
        return {Literal}
    inner = get_args(hint)
    return set().union(*map(kinds, inner)) if inner else {hint} - {type(None), ...}


class Option(typing.NamedTuple):
    """An option or a setting, its name on the command line, and a command line that accepts it."""

    name: str
    kinds: set[Any]
    line: Line
    group: str


def options() -> Iterator[Option]:
    """Every option of every command, and every setting, from their dataclasses."""
    marker = get_args(Positional[str])[1]
    parts = {f"analyse {part.__name__.lower()}": part for part in get_args(typing.get_type_hints(Analyse)["part"])}
    for owner, command in (COMMANDS | parts).items():
        lines = [line for line in RIGHT if line.owner == owner]
        plain = typing.get_type_hints(command)
        for name, hint in typing.get_type_hints(command, include_extras=True).items():
            if name not in ("settings", "part") and marker not in getattr(hint, "__metadata__", ()):
                option = "--" + {"program": "from"}.get(name, name).replace("_", "-")
                has = [line for line in lines if option in line.options] or lines[:1]
                yield from (Option(option, kinds(plain[name]), line, owner) for line in has[:1])
    for section, hints in HINTS.items():
        for name, hint in hints.items():
            option = f"--{section}.{name}".replace("_", "-")
            yield Option(option, kinds(hint), RIGHT[0], "train, its settings")


WRONG_TYPES: dict[Any, list[str]] = {
    int: ["1.5", "a", "1,5", "1e3x", "0x10", "true", "--", "\u0663x", "[1", "9" * 30 + "x"],
    float: ["a", "1,5x", "1.5.5", "0x1p3x", "one", "true", "1e", "--", "\u00bd"],
    Literal: ["nonsense", "", "0", "AUTO ", "none,", "\U0001f600"],
    bool: ["maybe", "2", "yess", "\u00e9"],
    Path: ["", "story.txt/below/it"],
    str: ["", "nope", "~nobody/x"],
}
LIMITS: dict[Any, list[str]] = {
    int: ["-1", "0", "-9223372036854775808", "2147483648", "9223372036854775807", "1" + 30 * "0"],
    float: ["-1", "0", "nan", "inf", "-inf", "1e-320", "1e308", "1e400", "-0.0"],
}


def wrong_types(dice: random.Random, world: Path) -> Iterator[Case]:
    for option in options():
        value = dice.choice(WRONG_TYPES[dice.choice(sorted(option.kinds, key=str))])
        sure = bool(option.kinds <= {int, float, Literal, bool})
        line = option.line.having(option.name, value)
        if "." in option.name and dice.random() < 0.5:
            yield in_recipe(option, json.dumps(value), refuse=str not in option.kinds)
            continue
        fast = line if sure or "." not in option.name else line.having("--print-config")
        yield Case(f"{option.name} {value!r}", fast, option.group, names=(option.name, value or "."))


def in_recipe(option: Option, value: str, **law: bool) -> Case:
    """Put the mistake into the recipe instead of the command line."""
    section, name = option.name.removeprefix("--").replace("-", "_").split(".")

    def spoil(world: Path) -> None:
        recipe = (world / "dish.toml").read_text().splitlines()
        kept = [row for row in recipe if row.partition(" = ")[0] != name]
        kept.insert(kept.index(f"[{section}]") + 1, f"{name} = {value}")
        (world / "dish.toml").write_text("\n".join(kept), encoding="utf-8")

    law |= {"refuse": False} if option.kinds == {str} else {}
    names = (f"{section}.{name}", name)
    return Case(
        f"{section}.{name} = {value} in the recipe", option.line, option.group, names=names, before=spoil, **law
    )


def out_of_range(dice: random.Random, world: Path) -> Iterator[Case]:
    for option in options():
        for kind in sorted(option.kinds & set(LIMITS), key=str):
            long = option.name.replace("-", "_").rpartition(".")[2].removeprefix("__") in LONG
            value = dice.choice([v for v in LIMITS[kind] if not long or v[0] in "-n" or v == "0"])
            names = (option.name, option.name.rpartition(".")[2].removeprefix("--"))
            sure = value in ("nan", "inf", "-inf") or (value == "-1" and "seed" not in option.name)
            case = Case(f"{option.name} {value}", option.line.having(option.name, value), option.group, names=names)
            dotted = "." in option.name and dice.random() < 0.5
            yield in_recipe(option, value, refuse=sure) if dotted else replace(case, refuse=sure)


def files(world: Path) -> Iterator[tuple[Line, Path]]:
    """Every command line with every file that it may read."""
    for line in RIGHT:
        for name in line.reads:
            found = [world / name] if (world / name).is_file() else (world / name).rglob("*")
            yield from ((line, file.relative_to(world)) for file in sorted(found) if file.is_file())


def spoilt(what: str, line: Line, file: Path, spoil: Change, **more: Any) -> Case:
    """A case in which `spoil` is applied to a file of the world."""
    names = tuple(part for part in file.parts if len(part) > 3)
    return Case(
        f"{file} {what}",
        line,
        f"{line.owner} {file.parts[0]}",
        names=names,
        before=lambda world: spoil(world / file),
        notice=must_notice(line, file),
        **more,
    )


def must_notice(line: Line, file: Path) -> bool:
    """Whether the command can check the file: by its checksum, or because the command read it before."""
    sealed = file.name in ("model.safetensors", "config.json", "vocab.json") and file.parts[:2] == (
        "alpha",
        "checkpoints",
    )
    return line.owner not in ("report", "bench") and (sealed or (file.name == "story.txt" and line.own_text))


ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "in UTF-16": lambda content: content.decode(errors="replace").encode("utf-16"),
    "in UTF-16 without a BOM": lambda content: content.decode(errors="replace").encode("utf-16-le"),
    "in UTF-32": lambda content: content.decode(errors="replace").encode("utf-32"),
    "in latin-1": lambda content: b"\xe9t\xe9 " + content.decode(errors="replace").encode("latin-1", "replace"),
    "with a BOM": lambda content: b"\xef\xbb\xbf" + content,
    "with NULs": lambda content: content.replace(b"e", b"\0"),
    "with CRLF": lambda content: content.replace(b"\n", b"\r\n"),
    "with lone surrogates": lambda content: content.replace(b"o", b"\xed\xa0\x80"),
    "with escapes of a terminal": lambda content: b"\x1b]0;owned\x07\x1b[2J" + content,
    "compressed": gzip.compress,
    "of random bytes": lambda content: random.Random(1).randbytes(len(content)),
}


def wrong_encodings(dice: random.Random, world: Path) -> Iterator[Case]:
    for (line, file), (what, change) in product(files(world), ENCODINGS.items()):
        if file.suffix not in (".bin", ".safetensors", ".npz", ".pt", ".html"):
            yield spoilt(what, line, file, lambda path, change=change: path.write_bytes(change(path.read_bytes())))


def missing(dice: random.Random, world: Path) -> Iterator[Case]:
    for line, file in files(world):
        yield spoilt("missing", line, file, remove)
    for line in RIGHT:
        for name in line.reads:
            yield spoilt("missing", line, Path(name), remove)
            yield spoilt("an empty folder", line, Path(name), lambda path: (remove(path), path.mkdir()))
        for name, values in line.options.items():
            if values:
                yield Case(
                    f"{name} without a value", line.having(name), line.owner, names=(name,), refuse="." not in name
                )
        if len(line.words) > 1:
            bare = replace(line, words=line.words[:-1])
            yield Case(f"{line.words[-1]} left out", bare, line.owner, refuse=line.owner not in ("report",))


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def instead(make: Change) -> Change:
    """A change that replaces a file or folder with something else."""

    def change(path: Path) -> None:
        if path.exists():
            remove(path)
        make(path)

    return change


def bind(path: Path) -> None:
    os.chdir(path.parent)
    socket.socket(socket.AF_UNIX).bind(path.name)


UNREADABLE: dict[str, Change] = {
    "a folder": instead(lambda path: path.mkdir()),
    "a file": instead(lambda path: path.write_text("x")),
    "an empty file": instead(lambda path: path.touch()),
    "a link to nothing": instead(lambda path: path.symlink_to("nowhere")),
    "a link to itself": instead(lambda path: path.symlink_to(path.name)),
    "a pipe": instead(os.mkfifo),
    "/dev/zero": instead(lambda path: path.symlink_to("/dev/zero")),
    "/dev/full": instead(lambda path: path.symlink_to("/dev/full")),
    "/dev/null": instead(lambda path: path.symlink_to("/dev/null")),
    "below a file": instead(lambda path: path.symlink_to(Path(__file__) / "below")),
    "/proc/self/mem": instead(lambda path: path.symlink_to("/proc/self/mem")),
}


def unreadable(dice: random.Random, world: Path) -> Iterator[Case]:
    for line, file in chain(files(world), ((each, Path(name)) for each in RIGHT for name in each.reads)):
        for what, change in UNREADABLE.items():
            case = spoilt(f"is {what}", line, file, change)
            yield replace(case, names=(*case.names, what))
    for line in RIGHT:
        for option in line.options.keys() & TARGETS:
            [name] = line.options[option]
            if name != "alpha":
                for what, change in UNREADABLE.items():
                    yield spoilt(f"to write is {what}", line, Path(name), change)
                for place in ("/proc/fresh", "/dev/full/fresh", "story.txt/fresh", "missing/deep/fresh", "/dev/null"):
                    yield Case(f"{option} {place}", line.having(option, place), line.owner, names=(place, option))
            yield Case(
                f"{option}: a full disk", line, line.owner, names=(name, "could not be written"), file_limit=4096
            )


def changed(dice: random.Random, world: Path) -> Iterator[Case]:
    """Cases with files that change after training, or while the command reads or writes them."""
    other = b"".join((world / name).read_bytes() for name in ("dish.toml", "lexicon.txt"))
    changes: dict[str, Callable[[bytes], bytes]] = {
        "cut to half": lambda content: content[: len(content) // 2],
        "emptied": lambda content: b"",
        "with a bit flipped": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        "longer": lambda content: content + content[-50:],
        "mangled": lambda content: mangled(random.Random(len(content)), content, other),
        "another one": lambda content: other,
    }
    for (line, file), (what, change) in product(files(world), changes.items()):
        if (world / file).stat().st_size > 9:
            yield spoilt(what, line, file, lambda path, change=change: path.write_bytes(change(path.read_bytes())))
    spoils = {"emptied": emptied, "removed": remove, "a folder": UNREADABLE["a folder"]}
    for line, (what, change) in product(RIGHT, spoils.items()):
        slow = (
            line.having("--train.max-steps", "40").having("--train.save-every", "5") if line.owner == "train" else line
        )
        written = [values[0] for name, values in line.options.items() if name in TARGETS]
        inside = [
            Path(name, part) for name in written for part in ("config.toml", "log.txt", "metrics.jsonl", "checkpoints")
        ]
        for file in [*map(Path, line.reads), *map(Path, written), *(inside if line.owner == "train" else [])]:
            case = spoilt(f"{what} while the command runs", slow, file, lambda path: None)
            yield replace(case, before=None, notice=False, later=lambda world, f=file, c=change: present(world / f, c))


def emptied(path: Path) -> None:
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            file.write_bytes(b"")


def present(path: Path, change: Change) -> None:
    if path.exists():
        change(path)


STREAMS = [
    *({"stdin": how} for how in ("closed", "written only", "binary")),
    *({"stdout": how} for how in ("closed", "full", "broken", "read only")),
    *({"stderr": how} for how in ("closed", "full", "broken")),
    *({"stdout": how, "stderr": how} for how in ("closed", "full", "broken")),
    {"stdin": "closed", "stdout": "closed", "stderr": "closed"},
]


def closed(dice: random.Random, world: Path) -> Iterator[Case]:
    for line, streams in product([*RIGHT, *HELP, *wrong_lines(dice)], STREAMS):
        what = ", ".join(f"{name} {how}" for name, how in streams.items())
        yield Case(what, line, f"{what} {line.owner}", streams=streams)


HELP = [Line((*owner.split(), "--help"), {}) for owner in ("", *dict.fromkeys(line.owner for line in RIGHT))]


def wrong_lines(dice: random.Random) -> list[Line]:
    """Command lines that are refused by tyro, by the settings, or by a command."""
    own = [
        "eval alpha --mem-len a",
        "train dish.toml --train.lr x --modle.d 1",
        "eval nowhere",
        "nonsense",
        "bench alpha --seconds x",
    ]
    return [Line.of(line) for line in own]


NAMES = [
    *(
        "-leading",
        "--data",
        "with space",
        " ",
        "line\nend",
        "caf\u00e9 \U0001f600",
        "\udcff\udcfe",
        "~nobody",
        "~",
        "x" * 255,
    ),
    *(
        "x" * 300,
        "",
        "a/" * 2000 + "b",
        "%s{0}{name}",
        "[red]x[/red]",
        "*",
        "[a-z]",
        "$HOME",
        "a'b\"c",
        "..",
        ".hidden",
        "hf:x",
    ),
    *(
        "@opening.txt",
        "\x1b[31mred",
        "name.gz",
        "name.xz",
        "story.txt/",
        "CON",
        "a\tb",
        "\u202eexe.txt",
        "-",
        "cpu",
        "None",
    ),
]


def odd_names(dice: random.Random, world: Path) -> Iterator[Case]:
    for line, name in product(RIGHT, NAMES):
        targets = [values[0] for option, values in line.options.items() if option in TARGETS and values[0] != "alpha"]
        for old in (*line.reads, *targets):
            shown = tuple(part for part in (name, repr(name)[1:-1], ascii(name)[1:-1]) if part)
            option = tuple(o for o, values in line.options.items() if old in values or f"@{old}" in values)
            yield Case(
                f"{old} is called {name[:40]!r}",
                line.naming(old, name),
                f"{line.owner} {old}",
                names=(*shown, *option, name[:60] or "empty", old),
                before=lambda world, old=old, name=name: move(world / old, world, name),
            )
    for option in options():
        if str in option.kinds and "." not in option.name:
            for text in (*NAMES, *(text for text in ODD_TEXTS if "\0" not in text and "\ud800" not in text)):
                yield Case(f"{option.name} {text[:40]!r}", option.line.having(option.name, text), option.group)


def move(path: Path, world: Path, name: str) -> None:
    """Rename a file of the world to the odd name, if a file can have that name."""
    if name and path.exists() and name not in ("..", "~", "~nobody", "story.txt/"):
        try:
            if not (world / name).exists():
                path.rename(world / name)
        except OSError:
            return


TERMINALS: list[tuple[dict[str, str | None], tuple[int, int] | None]] = [
    *(({"COLUMNS": width}, None) for width in ("1", "5", "0", "abc", "-3", "99999", "", "5.5")),
    *(({"TERM": term}, (24, 80)) for term in ("dumb", "", "nonsense", None)),
    *(({"COLUMNS": None, "LINES": None}, size) for size in ((24, 5), (1, 1), (0, 0), (24, 300))),
    *(({name: "1"}, (24, 40)) for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")),
    *(({"LC_ALL": locale}, None) for locale in ("C", "POSIX", "nonsense", "en_US.ISO-8859-1", "tr_TR.UTF-8")),
    ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, None),
    *(({"PYTHONIOENCODING": encoding}, None) for encoding in ("ascii", "latin-1", "utf-16")),
]


def odd_terminals(dice: random.Random, world: Path) -> Iterator[Case]:
    for line, (environment, pty) in product([*RIGHT, *HELP, *HELP, *wrong_lines(dice)], TERMINALS):
        what = " ".join(f"{name}={value}" for name, value in environment.items()) + (f", terminal {pty}" if pty else "")
        yield Case(what, line, what, environment=environment, pty=pty)


ENVIRONMENTS: list[dict[str, str | None]] = [
    *({"WORLD_SIZE": value} for value in ("", "abc", "0", "-1", "1.5", "2")),
    *({"RANK": value} for value in ("", "x", "7")),
    {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "x", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "x"},
    {"TORCHELASTIC_RUN_ID": ""},
    *({"HOME": value} for value in (None, "", "/nowhere", "story.txt", "/proc")),
    *(
        {"TXL_HOME": value}
        for value in (
            "",
            "story.txt",
            "/nowhere/x",
            "/proc/x",
            "~nobody",
            "caf\u00e9 \U0001f600",
            "\udcff",
            "/dev/full",
        )
    ),
    {"TXL_HOME": None, "HOME": None, "XDG_CACHE_HOME": "story.txt"},
    *({"TMPDIR": value} for value in ("/nowhere", "story.txt", "")),
    *({"OMP_NUM_THREADS": value} for value in ("", "abc", "0", "-1", "100000")),
    *({"CUDA_VISIBLE_DEVICES": value} for value in ("", "x", "99")),
    *({"PATH": value} for value in (None, "")),
    *({"HF_HOME": "story.txt", "HF_TOKEN": value} for value in ("", "caf\u00e9")),
    *({"MPLBACKEND": "nonsense", "MPLCONFIGDIR": value} for value in ("story.txt", "/nowhere")),
    {"PYTHONWARNINGS": "error"},
    {"PYTHONOPTIMIZE": "2"},
    {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "TZ": "nonsense", "SOURCE_DATE_EPOCH": "x"},
]


def odd_environments(dice: random.Random, world: Path) -> Iterator[Case]:
    for line, environment in product(RIGHT, ENVIRONMENTS):
        what = " ".join(f"{name}={value}" for name, value in environment.items())
        yield Case(what, line, next(iter(environment)) + " ".join(environment), environment=environment)
    for line in RIGHT:
        yield Case("the working folder is gone", line, "folder", gone=True)


CLASSES: dict[str, Callable[[random.Random, Path], Iterator[Case]]] = {
    "wrong type": wrong_types,
    "out of range": out_of_range,
    "wrong encoding": wrong_encodings,
    "missing": missing,
    "unreadable": unreadable,
    "changed while in use": changed,
    "closed stream": closed,
    "odd name": odd_names,
    "odd terminal": odd_terminals,
    "odd environment": odd_environments,
}


def drawn(seed: int, count: int, world: Path) -> list[tuple[str, Case]]:
    """The cases of a seed in random order: equally many from each class, from its groups in turn."""
    each: list[list[tuple[str, Case]]] = []
    for name, make in CLASSES.items():
        dice = random.Random(f"{seed} {name}")
        groups: dict[str, list[Case]] = {}
        for case in make(dice, world):
            groups.setdefault(case.group, []).append(case)
        shuffled = [dice.sample(cases, len(cases)) for cases in dice.sample(list(groups.values()), len(groups))]
        turns = chain.from_iterable(zip_longest(*shuffled))
        each.append([(name, case) for case in turns if case is not None])
    return [case for turn in zip_longest(*each) for case in turn if case is not None][:count]
