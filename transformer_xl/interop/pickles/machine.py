"""The state of a pickle that is being read, and what names and calls in it become: nothing is imported or called.

A name in the file is only compared with a list of names. Everything is charged with the bytes that it takes, so that
one limit bounds memory and time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from mmap import mmap
from typing import Any

from .inert import Damage, Name, Omitted, Refusal, StandIn, foreign

BUDGET = 1 << 30
"""Bytes that what a file makes may take, by our estimate; a vocabulary of 800,000 words takes 0.6 of it."""
COST, CONTAINER, ITEM = 64, 512, 64
"""Bytes that an operation, one that makes a container, and what stands in a container are charged with."""
_LARGE = 1 << 20
"""Longer strings are not taken out of the file."""
_LINE = 256
"""Characters that a name may have."""
_NUMBERS = 4096
"""Numbers that a file may use as keys. It chooses their hashes, but not those of text, into which a secret goes."""
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class Machine:
    """Reads the pickles of one file, within one budget.

    Args:
        names: every name a pickle may use, as "module.name", and what stands for it: a function of this machine and
            the arguments of a call, None for a stand-in, or a value.
        programs: modules of which, and of whose submodules, any name gives a stand-in.
        persistent: what stands for a persistent id; None refuses them.
    """

    def __init__(
        self,
        data: bytes | mmap,
        names: dict[str, Any],
        programs: tuple[str, ...] = (),
        persistent: Callable[[Any], Any] | None = None,
    ):
        self.data, self.names, self.programs, self.persistent = data, PLAIN | names, programs, persistent
        self.left, self.numbers = BUDGET, 0
        self.position = self.end = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def spend(self, cost: int) -> None:
        """Charge the budget."""
        self.left -= cost
        if self.left < 0:
            raise Refusal(f"makes more than {BUDGET:,} bytes of objects: no model does. Do not trust this file.")

    def take(self, size: int) -> bytes:
        """The next bytes."""
        start, self.position = self.position, self.position + size
        if self.position > self.end:
            raise Damage("it ends within a value")
        return self.data[start : self.position]

    def payload(self, size: int, decode: Callable[[bytes], Any]) -> Any:
        """The next bytes as a value, unless they are many."""
        if size <= _LARGE:
            self.spend(4 * size)
            return decode(self.take(size))
        if self.position + size > self.end:
            raise Damage("it ends within a value")
        self.position += size
        return Omitted(size)

    def line(self) -> str:
        """The next line."""
        newline = self.data.find(b"\n", self.position, min(self.end, self.position + _LINE))
        if newline < 0:
            raise Damage("a name has no end")
        return self.take(newline + 1 - self.position)[:-1].decode()

    def pop_mark(self) -> list[Any]:
        """What was pushed since the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def find(self, module: str, name: str) -> Any:
        """What stands for a name."""
        module = _RENAMED.get(module, module)
        full = f"{module}.{name}"
        if full.isascii() and len(full) <= _LINE and all(map(str.isidentifier, (*module.split("."), name))):
            if full in self.names:
                found = self.names[full]
                return Name(full, found) if found is None or callable(found) else found
            if any(f"{module}.".startswith(f"{program}.") for program in self.programs):
                return Name(full)
        raise foreign(full) if len(full.split()) == 1 else Damage("a name has spaces")

    def call(self, function: Any, arguments: Any) -> Any:
        """What stands for the result of a call."""
        if type(function) is not Name or type(arguments) is not tuple:
            raise Damage("it calls what is no function")
        return function.make(self, arguments) if function.make else StandIn(function.name, arguments)

    def extend(self, items: list[Any]) -> None:
        """Put `items` into the list or stand-in that was pushed last."""
        target = self.stack[-1].items if type(self.stack[-1]) is StandIn else self.stack[-1]
        if type(target) is not list:
            raise Damage("it appends to what is no list")
        target.extend(items)

    def set_items(self, target: Any, items: list[Any]) -> None:
        """Put `items`, keys and values in turn, into a dict or a stand-in."""
        if type(target) is StandIn:
            target.items = target.items or {}
            target = target.items
        if type(target) is not dict or len(items) % 2:
            raise Damage("it sets items of what is no dict")
        target.update(zip(self.hashable(items[::2]), items[1::2], strict=True))

    def hashable(self, keys: Any) -> Collection[Any]:
        """The keys of a dict or members of a set, if they take no long to hash and to find a place for."""
        if type(keys) not in (list, tuple, set, frozenset, dict):
            raise Damage("it makes a set of what is no list")
        self.spend(2 * ITEM * len(keys))
        kinds = Counter(map(type, keys))
        self.numbers += kinds[int] + kinds[float]
        if odd := kinds.keys() - {str, bytes, int, float, bool, type(None)}:
            raise Refusal(f"has a key of the type {odd.pop().__name__}: no model does. Do not trust this file.")
        if self.numbers > _NUMBERS:
            raise Refusal(f"has more than {_NUMBERS:,} numbers as keys: no model does. Do not trust this file.")
        return keys


def _mapping(machine: Machine, arguments: tuple[Any, ...]) -> dict[Any, Any]:
    content = arguments[0] if arguments else {}
    pairs = list(content.items()) if type(content) is dict else content
    if type(pairs) is not list or not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
        raise Damage("it makes a dict of what is no list of pairs")
    made: dict[Any, Any] = {}
    machine.set_items(made, [part for pair in pairs for part in pair])
    return made


PLAIN: dict[str, Any] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": lambda machine, arguments: _mapping(machine, arguments[1:]),
    "builtins.set": lambda machine, arguments: set(machine.hashable(arguments[0] if arguments else ())),
    "builtins.frozenset": lambda machine, arguments: frozenset(machine.hashable(arguments[0] if arguments else ())),
    **dict.fromkeys(("copyreg._reconstructor", "_codecs.encode", "builtins.bytes", "builtins.bytearray")),
    **dict.fromkeys(f"builtins.{name}" for name in ("object", "list", "dict", "tuple", "int", "float", "str", "bool")),
}
"""Names of Python's own."""
