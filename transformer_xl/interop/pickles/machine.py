"""Reads pickles of protocols 2 to 5, as `pickletools` describes them. Nothing is imported or called.

A name in a file is only compared with a list of names. Each operation is charged with the bytes that its result takes,
so one budget bounds memory and time.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from mmap import mmap
from typing import Any

from .inert import Damage, Name, Omitted, Refusal, StandIn, check_tree, outside_name

BUDGET = 1 << 30
"""Bytes that the objects of a file may take, by our estimate. A vocabulary of 800,000 words takes 0.6 of it."""
_COST, _CONTAINER, _ITEM = 64, 512, 64
"""Bytes charged for an operation, for one that makes a container, and for an item of a container."""
_COSTS = dict.fromkeys(b"]})\x8ft\x91\x85\x86\x87c\x93R\x81\x92", _CONTAINER) | dict.fromkeys(
    b"(qr\x94\x8a\x8bTUX\x8c\x8dBC\x8e\x96", 2 * _ITEM
)
"""The operations that cost more than `_COST`."""
_LARGE = 1 << 20
"""Longer strings are not taken out of the file."""
_LINE = 256
"""Characters that a name may have."""
_NUMBERS = 4096
"""Numbers that a file may use as keys. A file can choose numbers whose hashes collide; text is hashed with a secret."""
_INTEGER_BYTES = 64
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_OLD = b"FILPSVdgilop"
"""Operations that only protocols 0 and 1 need."""


class Machine:
    """Reads the pickles of one file, within one budget.

    Args:
        names: every name a pickle may use, as "module.name", and its meaning: a function of this machine and the
            arguments of a call, None for a stand-in, or a value.
        programs: modules of which, and of whose submodules, any name becomes a stand-in.
        persistent: returns the value of a persistent id. None refuses them.
    """

    def __init__(
        self,
        data: bytes | mmap,
        names: dict[str, Any],
        programs: tuple[str, ...] = (),
        persistent: Callable[[Any], Any] | None = None,
    ):
        self.data, self.names, self.programs, self.persistent = data, _PLAIN | names, programs, persistent
        self.left, self.numbers = BUDGET, 0
        self.position = self.end = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, start: int, end: int) -> tuple[Any, int]:
        """The value of the pickle that begins at byte `start`, and the byte after it, which is at most `end`.

        Raises:
            Refusal: with the rest of a sentence that begins with the file's name.
        """
        self.position, self.end = start, end
        self.stack, self.marks, self.memo = [], [], {}
        try:
            while self.position < end:
                code = self.data[self.position]
                self.position += 1
                if code == ord(".") and not self.marks:
                    [value] = self.stack
                    check_tree(value)
                    return value, self.position
                self.spend(_COSTS.get(code, _COST))
                if code in _VALUES:
                    value = _VALUES[code](self)  # which may put another stack in place of this one
                    self.stack.append(value)
                else:
                    _ACTIONS.get(code, _unknown)(self)
        except Refusal:
            raise
        except (LookupError, ValueError):
            raise Damage(f"what byte {self.position:,} needs is missing") from None
        raise Damage("it ends within a value")

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

    def string(self, size: int, decode: Callable[[bytes], Any]) -> Any:
        """The next bytes as a string, or an `Omitted` if they are many."""
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
        """The values that were pushed since the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def pop(self, size: int) -> list[Any]:
        """The last `size` values."""
        items = self.stack[-size:]
        if len(items) < size:
            raise IndexError
        del self.stack[-size:]
        return items

    def named(self, module: Any, name: Any) -> Any:
        """The meaning of a name."""
        if type(module) is not str or type(name) is not str:
            raise Damage("a name is no text")
        module = _RENAMED.get(module, module)
        full = f"{module}.{name}"
        if full.isascii() and len(full) <= _LINE and all(map(str.isidentifier, (*module.split("."), name))):
            if full in self.names:
                meaning = self.names[full]
                return Name(full, meaning) if meaning is None or callable(meaning) else meaning
            if any(f"{module}.".startswith(f"{program}.") for program in self.programs):
                return Name(full)
        raise outside_name(full) if len(full.split()) == 1 else Damage("a name has spaces")

    def call(self, function: Any, arguments: Any) -> Any:
        """The value that replaces the result of a call."""
        if type(function) is not Name or type(arguments) is not tuple:
            raise Damage("it calls what is no function")
        return function.make(self, arguments) if function.make else StandIn(function.name, arguments)

    def persistent_value(self, key: Any) -> Any:
        """The value of a persistent id."""
        if self.persistent is None:
            raise outside_name("an object outside of the file")
        return self.persistent(key)

    def set_items(self, target: Any, items: list[Any]) -> None:
        """Put `items`, which are keys and values in turn, into a dict or a stand-in."""
        if type(target) is StandIn:
            target.items = target.items or {}
            target = target.items
        if type(target) is not dict or len(items) % 2:
            raise Damage("it sets items of what is no dict")
        target.update(zip(self.hashable(items[::2]), items[1::2], strict=True))

    def hashable(self, keys: Any) -> Collection[Any]:
        """The keys of a dict or members of a set, which are refused if hashing them could take long."""
        if type(keys) not in (list, tuple, set, frozenset, dict):
            raise Damage("it makes a set of what is no list")
        self.spend(2 * _ITEM * len(keys))
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


_PLAIN: dict[str, Any] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": lambda machine, arguments: _mapping(machine, arguments[1:]),
    "builtins.set": lambda machine, arguments: set(machine.hashable(arguments[0] if arguments else ())),
    "builtins.frozenset": lambda machine, arguments: frozenset(machine.hashable(arguments[0] if arguments else ())),
    **dict.fromkeys(("copyreg._reconstructor", "_codecs.encode", "builtins.bytes", "builtins.bytearray")),
    **dict.fromkeys(f"builtins.{name}" for name in ("object", "list", "dict", "tuple", "int", "float", "str", "bool")),
}
"""Names of Python's own."""


def _number(layout: str) -> Callable[[Machine], Any]:
    number = struct.Struct(layout)
    return lambda machine: number.unpack(machine.take(number.size))[0]


_byte, _four, _eight = _number("<B"), _number("<I"), _number("<Q")
_latin1, _utf8 = partial(str, encoding="latin-1"), partial(str, encoding="utf-8", errors="surrogatepass")


def _string(size: Callable[[Machine], int], decode: Callable[[bytes], Any]) -> Callable[[Machine], Any]:
    return lambda machine: machine.string(size(machine), decode)


def _integer(machine: Machine, size: int) -> int:
    if size > _INTEGER_BYTES:
        raise Refusal(f"has an integer of {size:,} bytes: no model does. Do not trust this file.")
    return int.from_bytes(machine.take(size), "little", signed=True)


def _object(machine: Machine) -> Any:
    """The result of a call with keywords, which become its state."""
    function, arguments, keywords = machine.pop(3)
    made = machine.call(function, arguments)
    _set_state(made, keywords, machine)
    return made


def _by_code(operations: dict[bytes, Callable[[Machine], Any]]) -> dict[int, Callable[[Machine], Any]]:
    return {ord(code): operation for code, operation in operations.items()}


_VALUES = _by_code(
    {
        b"N": lambda machine: None,
        b"\x88": lambda machine: True,
        b"\x89": lambda machine: False,
        b"K": _byte,
        b"M": _number("<H"),
        b"J": _number("<i"),
        b"G": _number(">d"),
        b"\x8a": lambda machine: _integer(machine, _byte(machine)),
        b"\x8b": lambda machine: _integer(machine, _four(machine)),
        b"U": _string(_byte, _latin1),
        b"T": _string(_four, _latin1),
        b"\x8c": _string(_byte, _utf8),
        b"X": _string(_four, _utf8),
        b"\x8d": _string(_eight, _utf8),
        b"C": _string(_byte, bytes),
        b"B": _string(_four, bytes),
        b"\x8e": _string(_eight, bytes),
        b"\x96": _string(_eight, bytes),
        b"2": lambda machine: machine.stack[-1],
        b"h": lambda machine: machine.memo[_byte(machine)],
        b"j": lambda machine: machine.memo[_four(machine)],
        b"]": lambda machine: [],
        b"}": lambda machine: {},
        b")": lambda machine: (),
        b"\x8f": lambda machine: set(),
        b"t": lambda machine: tuple(machine.pop_mark()),
        b"\x85": lambda machine: tuple(machine.pop(1)),
        b"\x86": lambda machine: tuple(machine.pop(2)),
        b"\x87": lambda machine: tuple(machine.pop(3)),
        b"\x91": lambda machine: frozenset(machine.hashable(machine.pop_mark())),
        b"c": lambda machine: machine.named(machine.line(), machine.line()),
        b"\x93": lambda machine: machine.named(*machine.pop(2)),
        b"R": lambda machine: machine.call(*machine.pop(2)),
        b"\x81": lambda machine: machine.call(*machine.pop(2)),
        b"\x92": _object,
        b"Q": lambda machine: machine.persistent_value(*machine.pop(1)),
    }
)
"""The operations that push a value."""


def _unknown(machine: Machine) -> None:
    position = machine.position - 1
    if machine.data[position] in _OLD:
        raise Refusal("is a pickle of protocol 0 or 1, or a text. Save it again by protocol 2, or name another file.")
    raise Refusal(
        f"has no operation of a pickle's protocols 2 to 5 at byte {position:,}: it is of another kind, compressed, "
        "damaged, or asks for something outside of it. Name another file, or get it again."
    )


def _protocol(machine: Machine) -> None:
    if (protocol := _byte(machine)) > 5:
        raise Damage(f"protocol {protocol}")


def _mark(machine: Machine) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _put(machine: Machine, index: int) -> None:
    if index > len(machine.memo) + 1:  # picklers count from 0 or 1; freely chosen numbers could all collide
        raise Damage(f"memo {index}")
    machine.memo[index] = machine.stack[-1]


def _extend(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1].items if type(machine.stack[-1]) is StandIn else machine.stack[-1]
    if type(target) is not list:
        raise Damage("it appends to what is no list")
    target.extend(items)


def _set_items(machine: Machine, items: list[Any]) -> None:
    machine.set_items(machine.stack[-1], items)


def _add_items(machine: Machine) -> None:
    items = machine.pop_mark()
    if type(machine.stack[-1]) is not set:
        raise Damage("it adds items to what is no set")
    machine.stack[-1].update(machine.hashable(items))


def _build(machine: Machine) -> None:
    [state] = machine.pop(1)
    _set_state(machine.stack[-1], state, machine)


def _set_state(target: Any, state: Any, machine: Machine) -> None:
    if type(target) is dict:
        return  # a state dict's own attributes, beside its tensors
    if type(target) is not StandIn:
        raise Damage("it gives a state to what is no object")
    with_slots = type(state) is tuple and len(state) == 2 and all(type(part) in (dict, type(None)) for part in state)
    for part in state if with_slots else [state]:
        if type(part) is dict:
            machine.hashable(part)
            target.attributes.update(part)
        elif part is not None:
            target.attributes["state"] = part


_ACTIONS = _by_code(
    {
        b"\x80": _protocol,
        b"\x95": _eight,  # a frame's length
        b"(": _mark,
        b"0": lambda machine: machine.pop(1) if machine.stack else machine.pop_mark(),
        b"1": Machine.pop_mark,
        b"q": lambda machine: _put(machine, _byte(machine)),
        b"r": lambda machine: _put(machine, _four(machine)),
        b"\x94": lambda machine: _put(machine, len(machine.memo)),
        b"a": lambda machine: _extend(machine, machine.pop(1)),
        b"e": lambda machine: _extend(machine, machine.pop_mark()),
        b"s": lambda machine: _set_items(machine, machine.pop(2)),
        b"u": lambda machine: _set_items(machine, machine.pop_mark()),
        b"\x90": _add_items,
        b"b": _build,
    }
)
"""The operations that push nothing."""
