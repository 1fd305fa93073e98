"""Problems with settings: collected first, then reported together, one per line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import inf, isfinite
from typing import Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ..mistake import Mistake

Value = TypeVar("Value")
OPTION = "--{}"
"""The form of the name of a command's option."""


class Problem(NamedTuple):
    """Settings that are wrong, and a sentence with a slot {} for the name of each."""

    fields: tuple[str, ...]
    """The first one is wrong, because it contradicts the others."""
    sentence: str

    def named(self, form: str) -> str:
        """The sentence with each field in this form: "train.{}", or "--{}" for options of a command."""
        sentence = self.sentence
        for name in map(form.format, self.fields):  # not by `format`: the sentence may quote braces
            sentence = sentence.replace("{}", name.replace("_", "-") if form == OPTION else name, 1)
        return sentence


class WrongSettings(Mistake):
    """The error for wrong settings. Callers can print `problems` with other names."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems: list[Problem] = list(problems)
        super().__init__("\n".join(problem.named("{}") for problem in self.problems))

    def inside(self, section: str) -> list[Problem]:
        """The problems in a section of a run, whose name stands before those of its settings."""
        return [Problem(tuple(f"{section}.{name}" for name in each.fields), each.sentence) for each in self.problems]


def refuse_settings(problems: Iterable[Problem]) -> None:
    """Raise one `WrongSettings` with these problems, if there are any.

    Each setting is refused once. A setting that is wrong by itself is not compared with others, because the comparison
    would repeat the mistake.
    """
    kept: list[Problem] = []
    for problem in problems:
        subjects = {fields[0] for fields, _ in kept}
        alone = {fields[0] for fields, _ in kept if len(fields) == 1}
        if problem.fields[0] not in subjects and alone.isdisjoint(problem.fields):
            kept.append(problem)
    if kept:
        raise WrongSettings(kept)


class Checked:
    """Base class of groups of settings. The constructor refuses values that are wrong or do not fit each other.

    Raises:
        WrongSettings: a line for each setting that is wrong.
    """

    def __post_init__(self) -> None:
        refuse_settings([*_other_words(self), *self._problems()])

    def _problems(self) -> Iterator[Problem]:
        raise NotImplementedError


def _other_words(owner: object) -> Iterator[Problem]:
    """A problem for each setting that is none of the words of its type."""
    for name, words in _words_of(type(owner)).items():
        if getattr(owner, name) not in words:
            yield Problem((name,), f"{{}} must be one of {', '.join(words)}, got {getattr(owner, name)}.")


@cache  # settings are also made while a model runs
def _words_of(owner: type) -> dict[str, tuple[str, ...]]:
    hints = get_type_hints(owner).items()
    return {name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}


def out_of_bounds(
    owner: object, *names: str, least: float = -inf, above: float = -inf, most: float = inf, below: float = inf
) -> Iterator[Problem]:
    """A problem for each setting in `names` with a value out of bounds. None is a default and always allowed."""
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    must = " and ".join(f"{words} {bound:,}" for words, bound in bounds.items() if isfinite(bound))
    for name in names:
        given = getattr(owner, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and not (least <= value <= most and above < value < below):
                finite = "" if isinstance(value, int) or isfinite(value) else " and finite"
                yield Problem((name,), f"{{}} must be {must}{finite}, got {value}.")


class Problems(list[str]):
    """Sentences about mistakes in one call, reported together."""

    def attempt(self, make: Callable[[], Value], form: str = "{}") -> Value | None:
        """Call `make` and return its result; if it raises a `Mistake`, add its sentences and return None.

        Wrong settings are `named` in this form.
        """
        try:
            return make()
        except WrongSettings as error:
            self += [problem.named(form) for problem in error.problems]
        except Mistake as error:
            self += str(error).splitlines()
        return None

    def bound(self, options: object, *names: str, **bounds: float) -> None:
        """Add a sentence for each option of a command that is out of bounds."""
        self += [problem.named(OPTION) for problem in out_of_bounds(options, *names, **bounds)]

    def refuse(self) -> None:
        """Raise one `Mistake` with every sentence, each once, if there are any."""
        if self:
            raise Mistake("\n".join(dict.fromkeys(self)))
