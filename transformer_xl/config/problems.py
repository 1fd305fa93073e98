"""What is wrong with some settings: collected first, then reported together, a line each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from math import inf, isfinite
from typing import NamedTuple, TypeVar

from ..mistake import Mistake

Value = TypeVar("Value")


class Problem(NamedTuple):
    """Settings that do not fit, and a sentence with a slot {} for the name of each."""

    fields: tuple[str, ...]
    """The first one is the setting that is wrong; it contradicts the others."""
    sentence: str

    def __str__(self) -> str:
        return self.sentence.format(*self.fields)


class WrongSettings(Mistake):
    """Settings were refused. `problems` names them, so that a reader of options can name each as the user wrote it."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems: list[Problem] = list(problems)
        super().__init__("\n".join(map(str, self.problems)))


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


def out_of_bounds(
    owner: object, *names: str, least: float = -inf, above: float = -inf, most: float = inf, below: float = inf
) -> Iterator[Problem]:
    """The settings in `names` that are out of bounds, or hold a value that is; None is the default and always right."""
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    must = " and ".join(f"{words} {bound:,}" for words, bound in bounds.items() if isfinite(bound))
    for name in names:
        given = getattr(owner, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and not (least <= value <= most and above < value < below):
                yield Problem((name,), f"{{}} must be {must}, got {value}.")


class Problems(list[str]):
    """Sentences about what a user asked for, reported together."""

    def attempt(self, make: Callable[[], Value], worded: Callable[[Problem], str] = str) -> Value | None:
        """What `make` returns; None if it raises a `Mistake`, whose sentences are added. `worded` makes the sentence of
        a problem, or "" if that is not to be reported."""
        try:
            return make()
        except WrongSettings as error:
            self += filter(None, map(worded, error.problems))
        except Mistake as error:
            self += str(error).splitlines()
        return None

    def bound(self, options: object, *names: str, **bounds: float) -> None:
        """Add a sentence for each option of a command that is out of bounds."""
        self += map(as_options(names), out_of_bounds(options, *names, **bounds))

    def refuse(self) -> None:
        """Raise one `Mistake` with every sentence, each once, if there are any."""
        if self:
            raise Mistake("\n".join(dict.fromkeys(self)))


def as_options(typed: Collection[str]) -> Callable[[Problem], str]:
    """Word a problem of a command: a setting that the user typed is named as its option."""
    return lambda problem: problem.sentence.format(
        *(f"--{name.replace('_', '-')}" if name in typed else name for name in problem.fields)
    )
