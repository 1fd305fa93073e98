"""The state of a pickle that is being read, and what names and calls in it become: nothing is imported or called.

A name in the file is only compared with a list of names. Everything is charged with the bytes that it takes, so that
one limit bounds memory and time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from mmap import mmap
from typing import Any

from .inert import Damage, Name, Omitted, Refusal, StandIn, foreign, hashable_keys

BUDGET = 1 << 30
"""Bytes that what a file makes may take, by our estimate; a vocabulary of 800,000 words takes 0.6 of it."""
COST, CONTAINER, ITEM = 64, 512, 64
"""Bytes that an operation, one that makes a container, and what stands in a container are charged with."""
_LARGE = 1 << 20
"""Longer strings are not taken out of the file."""
LINE = 256
"""Characters that a name may have."""
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
        self.left = BUDGET
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

    def line(self, decode: Callable[[bytes], Any], longest: int | None = None) -> Any:
        """The next line as a value."""
        end = self.end if longest is None else min(self.end, self.position + longest)
        newline = self.data.find(b"\n", self.position, end)
        if newline < 0:
            raise Damage("a line has no end")
        value = self.payload(newline - self.position, decode)
        self.position = newline + 1
        return value

    def pop_mark(self) -> list[Any]:
        """What was pushed since the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def find(self, module: str, name: str) -> Any:
        """What stands for a name."""
        module = _RENAMED.get(module, module)
        full = f"{module}.{name}"
        if name.isidentifier() and full.isascii() and len(full) <= LINE:
            if full in self.names:
                found = self.names[full]
                return Name(full, make=found) if found is None or callable(found) else found
            if any(f"{module}.".startswith(f"{program}.") for program in self.programs):
                return Name(full)
        raise foreign(full) if len(full.split()) == 1 else Damage("a name has spaces")

    def call(self, function: Any, arguments: Any) -> Any:
        """What stands for the result of a call."""
        if type(function) is not Name or type(arguments) is not tuple:
            raise Damage("it calls what is no function")
        return function.make(self, arguments) if function.make else StandIn(function.name, arguments)

    def extend(self, target: Any, items: list[Any]) -> None:
        """Put `items` into a list or a stand-in."""
        target = target.items if type(target) is StandIn else target
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
        self.spend(ITEM * len(items))
        target.update(zip(hashable_keys(items[::2]), items[1::2], strict=True))

    def members(self, items: Any) -> Iterable[Any]:
        """Items that a set may have."""
        if type(items) not in (list, tuple, set, frozenset):
            raise Damage("it makes a set of what is no list")
        self.spend(2 * ITEM * len(items))
        return hashable_keys(items)


def _mapping(machine: Machine, arguments: tuple[Any, ...]) -> dict[Any, Any]:
    content = arguments[0] if arguments else {}
    pairs = list(content.items()) if type(content) is dict else content
    if type(pairs) is not list or not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
        raise Damage("it makes a dict of what is no list of pairs")
    made: dict[Any, Any] = {}
    machine.set_items(made, [part for pair in pairs for part in pair])
    return made


def _bytes(machine: Machine, arguments: tuple[Any, ...]) -> bytes | Omitted:
    text, *encoding = arguments or (b"",)
    if type(text) is str and encoding in (["latin1"], ["latin-1"]):
        machine.spend(len(text))
        text = text.encode("latin-1")
    if isinstance(text, bytes | Omitted):
        return text
    raise Damage("it makes bytes of what is no text")


def _reconstructed(machine: Machine, arguments: tuple[Any, ...]) -> StandIn:
    if len(arguments) != 3 or type(arguments[0]) is not Name:
        raise Damage("it makes an object of no class")
    return StandIn(arguments[0].name, () if arguments[2] is None else (arguments[2],))


PLAIN: dict[str, Any] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": lambda machine, arguments: _mapping(machine, arguments[1:]),
    "builtins.set": lambda machine, arguments: set(machine.members(arguments[0] if arguments else ())),
    "builtins.frozenset": lambda machine, arguments: frozenset(machine.members(arguments[0] if arguments else ())),
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "_codecs.encode": _bytes,
    "copyreg._reconstructor": _reconstructed,
} | dict.fromkeys(f"builtins.{name}" for name in ("object", "list", "dict", "tuple", "int", "float", "str", "bool"))
"""Names of Python's own."""
