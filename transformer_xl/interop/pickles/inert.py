"""Inert forms of untrusted data: mapped bytes, plain values, stand-ins that do nothing, and refusals."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...mistake import Mistake

_DEPTH, _NODES = 100, 1 << 22


class Refusal(Mistake):
    """The reason why a file is refused: a sentence without its subject, the file's name."""


def printable(name: str) -> str:
    """A name from a file, safe to print on a terminal: long and unprintable names are cut and escaped."""
    return name if name.isprintable() and len(name) <= 100 else ascii(name[:100])


def outside_name(name: str) -> Refusal:
    """The refusal of a file that names something outside of it."""
    return Refusal(
        f"asks for {printable(name)}, which is no part of a model: nothing of it was run. Do not trust this file."
    )


def map_file(path: Path) -> mmap.mmap:
    """Map a file's bytes to memory. Writes change a copy; read-only memory would cause warnings of torch.

    Raises:
        FileNotFoundError, ValueError: the file is missing, not a regular file, empty, or too large to be mapped.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, or no regular file. Get it, and all that belongs to it.")
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (ValueError, OSError) as error:
            raise Mistake(f"{path} cannot be mapped to memory ({error}). Get it again, or more memory.") from error


@dataclass(slots=True, eq=False)
class StandIn:
    """A record of another program's object. It holds the data of the object and runs none of its code."""

    name: str
    """The class with its module: "mem_transformer.MemTransformerLM"."""
    arguments: tuple[Any, ...] = ()
    attributes: dict[Any, Any] = field(default_factory=dict)
    """The object's state. A state that is not a dict is under "state"."""

    def __repr__(self) -> str:
        return f"<StandIn of {self.name}>"


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """A class or function named in a pickle. `make` computes the result of a call; None makes a stand-in."""

    name: str
    make: Callable[..., Any] | None = None


_NESTED = {list, tuple, dict, StandIn}


def _inside(value: Any) -> list[Any]:
    parts: Iterable[Any] = value
    if type(value) is StandIn:
        parts = (value.arguments, value.attributes)
    elif type(value) is dict:
        parts = value.values()
    return [part for part in parts if type(part) in _NESTED]


def check_tree(root: Any) -> None:
    """Refuse an object that contains itself, is nested deeper than any model, or is larger because of sharing."""
    known: dict[int, tuple[int, int]] = {}  # levels and nodes

    def measure(value: Any, above: int) -> tuple[int, int]:
        levels, nodes = known.get(id(value), (0, 0))
        if not levels and above < _DEPTH:
            sizes = [measure(part, above + 1) for part in _inside(value)]
            levels, nodes = 1 + max((level for level, _ in sizes), default=0), 1 + sum(count for _, count in sizes)
            known[id(value)] = levels, nodes
        if not levels or above + levels > _DEPTH or nodes > _NODES:
            raise Refusal(f"nests deeper than {_DEPTH} levels or shares more than a model. Do not trust this file.")
        return levels, nodes

    if type(root) in _NESTED:
        measure(root, 0)
