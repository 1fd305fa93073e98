"""Reads pickles of protocols 2 to 5, as `pickletools` describes them. Nothing is imported or called.

A name in a file is only compared with a list of names. Each operation is charged with the bytes that its result takes,
so one budget bounds memory and time.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Collection
from mmap import mmap
from typing import Any

from .inert import Damage, Name, Omitted, Refusal, StandIn, check_tree, foreign

BUDGET = 1 << 30
"""Bytes that the objects of a file may take, by our estimate. A vocabulary of 800,000 words takes 0.6 of it."""
_COST, _CONTAINER, _ITEM = 64, 512, 64
"""Bytes charged for an operation, for one that makes a container, and for an item of a container."""
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
                cost, argument, operation = _OPERATIONS.get(code, (0, _none, _unknown))
                self.spend(cost)
                operation(self, argument(self))
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
        raise foreign(full) if len(full.split()) == 1 else Damage("a name has spaces")

    def call(self, function: Any, arguments: Any) -> Any:
        """The value that replaces the result of a call."""
        if type(function) is not Name or type(arguments) is not tuple:
            raise Damage("it calls what is no function")
        return function.make(self, arguments) if function.make else StandIn(function.name, arguments)

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


# The arguments of operations: numbers and strings that follow in the file, or values from the stack.


def _none(machine: Machine) -> None: ...


def _new(make: Callable[[], Any]) -> Callable[[Machine], Any]:
    return lambda machine: make()


def _last(size: int) -> Callable[[Machine], list[Any]]:
    return lambda machine: machine.pop(size)


def _number(layout: str) -> Callable[[Machine], Any]:
    number = struct.Struct(layout)
    return lambda machine: number.unpack(machine.take(number.size))[0]


def _string(layout: str, decode: Callable[[bytes], Any]) -> Callable[[Machine], Any]:
    """A string after its size."""
    size = _number(layout)
    return lambda machine: machine.string(size(machine), decode)


def _integer(layout: str) -> Callable[[Machine], int]:
    """An integer of any size, after its size in bytes."""
    read_size = _number(layout)

    def argument(machine: Machine) -> int:
        size = read_size(machine)
        if size > _INTEGER_BYTES:
            raise Refusal(f"has an integer of {size:,} bytes: no model does. Do not trust this file.")
        return int.from_bytes(machine.take(size), "little", signed=True)

    return argument


def _latin1(text: bytes) -> str:
    return text.decode("latin-1")


def _utf8(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")


# The operations on their arguments.


def _unknown(machine: Machine, _: None) -> None:
    position = machine.position - 1
    if machine.data[position] in _OLD:
        raise Refusal("is a pickle of protocol 0 or 1, or a text. Save it again by protocol 2, or name another file.")
    raise Refusal(
        f"has no operation of a pickle's protocols 2 to 5 at byte {position:,}: it is of another kind, compressed, "
        "damaged, or asks for something outside of it. Name another file, or get it again."
    )


def _protocol(machine: Machine, protocol: int) -> None:
    if protocol > 5:
        raise Damage(f"protocol {protocol}")


def _ignore(machine: Machine, value: Any) -> None: ...


def _push(machine: Machine, value: Any) -> None:
    machine.stack.append(value)


def _mark(machine: Machine, _: None) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _drop(machine: Machine, _: None) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


def _put(machine: Machine, index: int) -> None:
    if index > len(machine.memo) + 1:  # picklers count from 0 or 1; freely chosen numbers could all collide
        raise Damage(f"memo {index}")
    machine.memo[index] = machine.stack[-1]


def _get(machine: Machine, index: int) -> None:
    machine.stack.append(machine.memo[index])


def _tuple(machine: Machine, items: list[Any]) -> None:
    machine.stack.append(tuple(items))


def _frozenset(machine: Machine, items: list[Any]) -> None:
    machine.stack.append(frozenset(machine.hashable(items)))


def _extend(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1].items if type(machine.stack[-1]) is StandIn else machine.stack[-1]
    if type(target) is not list:
        raise Damage("it appends to what is no list")
    target.extend(items)


def _set_items(machine: Machine, items: list[Any]) -> None:
    machine.set_items(machine.stack[-1], items)


def _add_items(machine: Machine, items: list[Any]) -> None:
    if type(machine.stack[-1]) is not set:
        raise Damage("it adds items to what is no set")
    machine.stack[-1].update(machine.hashable(items))


def _name(machine: Machine, parts: list[Any]) -> None:
    machine.stack.append(machine.named(*parts))


def _call(machine: Machine, items: list[Any]) -> None:
    """Call a function with its arguments. Keywords, if any, become the result's state."""
    function, arguments, *keywords = items
    machine.stack.append(machine.call(function, arguments))
    if keywords:
        _build(machine, keywords)


def _build(machine: Machine, states: list[Any]) -> None:
    [state], target = states, machine.stack[-1]
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


def _persistent(machine: Machine, keys: list[Any]) -> None:
    if machine.persistent is None:
        raise foreign("an object outside of the file")
    machine.stack.append(machine.persistent(*keys))


_Operation = tuple[int, Callable[[Machine], Any], Callable[[Machine, Any], None]]
_OPERATIONS: dict[int, _Operation] = {
    ord(code): (cost, argument, operation)
    for cost, operations in {
        _COST: {
            b"\x80": (_number("<B"), _protocol),
            b"\x95": (_number("<Q"), _ignore),  # a frame's length
            b"0": (_none, _drop),
            b"1": (Machine.pop_mark, _ignore),
            b"2": (lambda machine: machine.stack[-1], _push),
            b"N": (_none, _push),
            b"\x88": (_new(lambda: True), _push),
            b"\x89": (_new(lambda: False), _push),
            b"K": (_number("<B"), _push),
            b"M": (_number("<H"), _push),
            b"J": (_number("<i"), _push),
            b"G": (_number(">d"), _push),
            b"h": (_number("<B"), _get),
            b"j": (_number("<I"), _get),
            b"a": (_last(1), _extend),
            b"e": (Machine.pop_mark, _extend),
            b"s": (_last(2), _set_items),
            b"u": (Machine.pop_mark, _set_items),
            b"\x90": (Machine.pop_mark, _add_items),
            b"b": (_last(1), _build),
            b"Q": (_last(1), _persistent),
        },
        2 * _ITEM: {
            b"(": (_none, _mark),
            b"q": (_number("<B"), _put),
            b"r": (_number("<I"), _put),
            b"\x94": (lambda machine: len(machine.memo), _put),
            b"\x8a": (_integer("<B"), _push),
            b"\x8b": (_integer("<I"), _push),
            b"T": (_string("<I", _latin1), _push),
            b"U": (_string("<B", _latin1), _push),
            b"X": (_string("<I", _utf8), _push),
            b"\x8c": (_string("<B", _utf8), _push),
            b"\x8d": (_string("<Q", _utf8), _push),
            b"B": (_string("<I", bytes), _push),
            b"C": (_string("<B", bytes), _push),
            b"\x8e": (_string("<Q", bytes), _push),
            b"\x96": (_string("<Q", bytes), _push),
        },
        _CONTAINER: {
            b"]": (_new(list), _push),
            b"}": (_new(dict), _push),
            b")": (_new(tuple), _push),
            b"\x8f": (_new(set), _push),
            b"t": (Machine.pop_mark, _tuple),
            b"\x91": (Machine.pop_mark, _frozenset),
            b"\x85": (_last(1), _tuple),
            b"\x86": (_last(2), _tuple),
            b"\x87": (_last(3), _tuple),
            b"c": (lambda machine: [machine.line(), machine.line()], _name),
            b"\x93": (_last(2), _name),
            b"R": (_last(2), _call),
            b"\x81": (_last(2), _call),
            b"\x92": (_last(3), _call),
        },
    }.items()
    for code, (argument, operation) in operations.items()
}
