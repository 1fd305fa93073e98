"""The operations of a pickle, protocols 0 to 5 as `pickletools` tells them, but those that reach outside the file."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

from .inert import Damage, Refusal, StandIn, check_tree, foreign
from .pickle_machine import CONTAINER, COST, ITEM, LINE, Machine

_PROTOCOL = 5
_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"\\": b"\\", b"'": b"'", b'"': b'"'}
_DIGITS, _INTEGER_BYTES = 160, 64


def run(machine: Machine, start: int, end: int) -> tuple[Any, int]:
    """The value of the pickle that begins at byte `start`, and where it ends, which is at `end` at the latest.

    Raises:
        Refusal: with the rest of a sentence that begins with the file's name.
    """
    machine.position, machine.end = start, end
    machine.stack, machine.marks, machine.memo = [], [], {}
    try:
        while machine.position < end:
            code = machine.data[machine.position]
            machine.position += 1
            if code == _STOP and not machine.marks:
                [value] = machine.stack
                check_tree(value)
                return value, machine.position
            operation, cost = _OPERATIONS.get(code, _UNKNOWN)
            machine.left -= cost
            if machine.left < 0:
                machine.spend(0)
            operation(machine)
    except Refusal:
        raise
    except (LookupError, ValueError, struct.error):
        raise Damage(f"what byte {machine.position:,} needs is not there") from None
    raise Damage("it ends within a value")


def _unknown(machine: Machine) -> None:
    raise Damage(f"byte {machine.position}: no such operation")


def _stop_before(name: str) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        raise foreign(name)

    return operation


def _value(make: Callable[[], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(make())


def _number(layout: str) -> Callable[[Machine], None]:
    number = struct.Struct(layout)
    return lambda machine: machine.stack.append(number.unpack(machine.take(number.size))[0])


def _integer(layout: str) -> Callable[[Machine], None]:
    length = struct.Struct(layout)

    def operation(machine: Machine) -> None:
        [size] = length.unpack(machine.take(length.size))
        if size > _INTEGER_BYTES:
            raise Refusal(f"has an integer of {size:,} bytes: no model does. Do not trust this file.")
        machine.stack.append(int.from_bytes(machine.take(size), "little", signed=True))

    return operation


def _string(layout: str, decode: Callable[[bytes], Any]) -> Callable[[Machine], None]:
    length = struct.Struct(layout)

    def operation(machine: Machine) -> None:
        [size] = length.unpack(machine.take(length.size))
        machine.stack.append(machine.payload(size, decode))

    return operation


def _line(decode: Callable[[bytes], Any], longest: int | None = _DIGITS) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(machine.line(decode, longest))


def _utf8(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")


def _latin1(text: bytes) -> str:
    return text.decode("latin-1")


def _quoted(text: bytes) -> str:
    """A string as Python 2 writes it."""
    if len(text) < 2 or text[:1] not in (b"'", b'"') or text[-1] != text[0]:
        raise Damage("a string has no quotes")
    return re.sub(rb"\\(?:x([0-9a-f]{2})|(.?))", _unescaped, text[1:-1], flags=re.DOTALL).decode("latin-1")


def _unescaped(match: re.Match[bytes]) -> bytes:
    return bytes.fromhex(match[1].decode()) if match[1] else _ESCAPES[match[2]]


def _int_line(text: bytes) -> int | bool:
    return {b"00": False, b"01": True}.get(text, int(text))


def _put(machine: Machine, index: int) -> None:
    if not 0 <= index <= machine.position:  # whoever counts what is put comes no further
        raise Damage(f"memo {index}")
    machine.memo[index] = machine.stack[-1]


def _puts(read: Callable[[Machine], int]) -> Callable[[Machine], None]:
    return lambda machine: _put(machine, read(machine))


def _gets(read: Callable[[Machine], int]) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(machine.memo[read(machine)])


def _mark(machine: Machine) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


def _marked(make: Callable[[Machine, list[Any]], Any]) -> Callable[[Machine], None]:
    """An operation that makes a value of what was pushed since the mark."""

    def operation(machine: Machine) -> None:
        items = machine.pop_mark()
        machine.stack.append(make(machine, items))

    return operation


def _marked_dict(machine: Machine, items: list[Any]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    machine.set_items(made, items)
    return made


def _tuple(size: int) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        if len(machine.stack) < size:
            raise IndexError
        machine.stack[-size:] = [tuple(machine.stack[-size:])]

    return operation


def _append(machine: Machine) -> None:
    value = machine.stack.pop()
    machine.extend(machine.stack[-1], [value])


def _appends(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.extend(machine.stack[-1], items)


def _set_item(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items(machine.stack[-1], [key, value])


def _set_items(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.set_items(machine.stack[-1], items)


def _add_items(machine: Machine) -> None:
    items = machine.pop_mark()
    if type(machine.stack[-1]) is not set:
        raise Damage("it adds items to what is no set")
    machine.stack[-1].update(machine.members(items))


def _global(machine: Machine) -> None:
    module, name = machine.line(_utf8, LINE), machine.line(_utf8, LINE)
    machine.stack.append(machine.find(module, name))


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(module) is not str or type(name) is not str:
        raise Damage("a name is no text")
    machine.stack.append(machine.find(module, name))


def _reduce(machine: Machine) -> None:
    arguments, function = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.call(function, arguments))


def _new_object_ex(machine: Machine) -> None:
    keywords = machine.stack.pop()
    _reduce(machine)
    machine.stack.append(keywords)
    _build(machine)


def _inst(machine: Machine) -> None:
    module, name = machine.line(_utf8, LINE), machine.line(_utf8, LINE)
    arguments = tuple(machine.pop_mark())
    machine.stack.append(machine.call(machine.find(module, name), arguments))


def _build(machine: Machine) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    if type(target) is dict:
        return  # what a state dict keeps beside its tensors
    if type(target) is not StandIn:
        raise Damage("it gives a state to what is no object")
    with_slots = type(state) is tuple and len(state) == 2 and all(type(part) in (dict, type(None)) for part in state)
    for part in state if with_slots else [state]:
        if type(part) is dict:
            machine.spend(ITEM * len(part))
            target.attributes.update(part)
        elif part is not None:
            target.attributes["state"] = part


def _persistent(machine: Machine, key: Any) -> None:
    if machine.persistent is None:
        raise foreign("an object outside of the file")
    machine.stack.append(machine.persistent(key))


def _protocol(machine: Machine) -> None:
    if (protocol := machine.take(1)[0]) > _PROTOCOL:
        raise Damage(f"protocol {protocol}")


def _first(layout: str) -> Callable[[Machine], int]:
    number = struct.Struct(layout)
    return lambda machine: number.unpack(machine.take(number.size))[0]


def _index_line(machine: Machine) -> int:
    return machine.line(int, _DIGITS)


_STOP = ord(".")
_UNKNOWN = (_unknown, 0)
_OPERATIONS: dict[int, tuple[Callable[[Machine], None], int]] = {
    ord(code): (operation, cost)
    for cost, operations in {
        COST: {
            b"\x80": _protocol,
            b"\x95": lambda machine: machine.take(8),  # a frame's length
            b"0": _pop,
            b"1": lambda machine: machine.pop_mark(),
            b"2": lambda machine: machine.stack.append(machine.stack[-1]),
            b"N": _value(lambda: None),
            b"\x88": _value(lambda: True),
            b"\x89": _value(lambda: False),
            b"I": _line(_int_line),
            b"L": _line(lambda text: int(text.removesuffix(b"L"))),
            b"F": _line(float),
            b"K": _number("<B"),
            b"M": _number("<H"),
            b"J": _number("<i"),
            b"G": _number(">d"),
            b"g": _gets(_index_line),
            b"h": _gets(_first("<B")),
            b"j": _gets(_first("<I")),
            b"a": _append,
            b"e": _appends,
            b"s": _set_item,
            b"u": _set_items,
            b"\x90": _add_items,
            b"b": _build,
            b"P": lambda machine: _persistent(machine, machine.line(_latin1, LINE)),
            b"Q": lambda machine: _persistent(machine, machine.stack.pop()),
            **dict.fromkeys((b"\x82", b"\x83", b"\x84"), _stop_before("a class by an extension code")),
            **dict.fromkeys((b"\x97", b"\x98"), _stop_before("a buffer outside of the file")),
        },
        2 * ITEM: {
            b"(": _mark,
            b"p": _puts(_index_line),
            b"q": _puts(_first("<B")),
            b"r": _puts(_first("<I")),
            b"\x94": lambda machine: _put(machine, len(machine.memo)),
            b"\x8a": _integer("<B"),
            b"\x8b": _integer("<I"),
            b"S": _line(_quoted, None),
            b"V": _line(lambda text: text.decode("raw-unicode-escape"), None),
            b"T": _string("<I", _latin1),
            b"U": _string("<B", _latin1),
            b"X": _string("<I", _utf8),
            b"\x8c": _string("<B", _utf8),
            b"\x8d": _string("<Q", _utf8),
            b"B": _string("<I", bytes),
            b"C": _string("<B", bytes),
            b"\x8e": _string("<Q", bytes),
            b"\x96": _string("<Q", bytes),
        },
        CONTAINER: {
            b"]": _value(list),
            b"}": _value(dict),
            b")": _value(tuple),
            b"\x8f": _value(set),
            b"t": _marked(lambda machine, items: tuple(items)),
            b"l": _marked(lambda machine, items: items),
            b"d": _marked(_marked_dict),
            b"\x91": _marked(lambda machine, items: frozenset(machine.members(items))),
            b"o": _marked(lambda machine, items: machine.call(items[0], tuple(items[1:]))),
            b"\x85": _tuple(1),
            b"\x86": _tuple(2),
            b"\x87": _tuple(3),
            b"c": _global,
            b"\x93": _stack_global,
            b"i": _inst,
            b"R": _reduce,
            b"\x81": _reduce,
            b"\x92": _new_object_ex,
        },
    }.items()
    for code, operation in operations.items()
}
