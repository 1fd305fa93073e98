"""The operations of a pickle of protocol 2 to 5, as `pickletools` tells them, but those that reach outside the file."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from .inert import Damage, Refusal, StandIn, check_tree, foreign
from .machine import CONTAINER, COST, ITEM, Machine

_INTEGER_BYTES = 64
_TEXT = b"FILPSVdgilop"
"""Operations that only protocols 0 and 1 need."""


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
    except (LookupError, ValueError):
        raise Damage(f"what byte {machine.position:,} needs is not there") from None
    raise Damage("it ends within a value")


def _unknown(machine: Machine) -> None:
    place = machine.position - 1
    if machine.data[place] in _TEXT:
        raise Refusal("is a pickle of protocol 0 or 1, or a text. Save it again by protocol 2, or name another file.")
    raise Refusal(
        f"has no operation of a pickle's protocols 2 to 5 at byte {place:,}: it is of another kind, compressed, "
        "damaged, or asks for something outside of it. Name another file, or get it again."
    )


def _value(make: Callable[[], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(make())


def _reads(layout: str, then: Callable[[Machine, Any], None]) -> Callable[[Machine], None]:
    """An operation that goes on with the number behind it."""
    number = struct.Struct(layout)
    return lambda machine: then(machine, number.unpack(machine.take(number.size))[0])


def _push(machine: Machine, value: Any) -> None:
    machine.stack.append(value)


def _integer(machine: Machine, size: int) -> None:
    if size > _INTEGER_BYTES:
        raise Refusal(f"has an integer of {size:,} bytes: no model does. Do not trust this file.")
    machine.stack.append(int.from_bytes(machine.take(size), "little", signed=True))


def _string(decode: Callable[[bytes], Any]) -> Callable[[Machine, int], None]:
    return lambda machine, size: machine.stack.append(machine.payload(size, decode))


_bytes, _latin1 = _string(bytes), _string(lambda text: text.decode("latin-1"))
_utf8 = _string(lambda text: text.decode("utf-8", "surrogatepass"))


def _put(machine: Machine, index: int) -> None:
    if index > len(machine.memo) + 1:  # picklers count from 0 or 1; freely chosen, the numbers could all collide
        raise Damage(f"memo {index}")
    machine.memo[index] = machine.stack[-1]


def _get(machine: Machine, index: int) -> None:
    machine.stack.append(machine.memo[index])


def _mark(machine: Machine) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


def _marked(then: Callable[[Machine, list[Any]], None]) -> Callable[[Machine], None]:
    """An operation on what was pushed since the mark."""
    return lambda machine: then(machine, machine.pop_mark())


def _last(size: int, then: Callable[[Machine, list[Any]], None]) -> Callable[[Machine], None]:
    """An operation on so many values."""

    def operation(machine: Machine) -> None:
        items = machine.stack[-size:]
        if len(items) < size:
            raise IndexError
        del machine.stack[-size:]
        then(machine, items)

    return operation


def _set_items(machine: Machine, items: list[Any]) -> None:
    machine.set_items(machine.stack[-1], items)


def _add_items(machine: Machine, items: list[Any]) -> None:
    if type(machine.stack[-1]) is not set:
        raise Damage("it adds items to what is no set")
    machine.stack[-1].update(machine.hashable(items))


def _tuple(machine: Machine, items: list[Any]) -> None:
    machine.stack.append(tuple(items))


def _frozenset(machine: Machine, items: list[Any]) -> None:
    machine.stack.append(frozenset(machine.hashable(items)))


def _global(machine: Machine) -> None:
    machine.stack.append(machine.find(machine.line(), machine.line()))


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


def _build(machine: Machine) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    if type(target) is dict:
        return  # what a state dict keeps beside its tensors
    if type(target) is not StandIn:
        raise Damage("it gives a state to what is no object")
    with_slots = type(state) is tuple and len(state) == 2 and all(type(part) in (dict, type(None)) for part in state)
    for part in state if with_slots else [state]:
        if type(part) is dict:
            machine.hashable(part)
            target.attributes.update(part)
        elif part is not None:
            target.attributes["state"] = part


def _persistent(machine: Machine) -> None:
    if machine.persistent is None:
        raise foreign("an object outside of the file")
    machine.stack.append(machine.persistent(machine.stack.pop()))


def _protocol(machine: Machine, protocol: int) -> None:
    if protocol > 5:
        raise Damage(f"protocol {protocol}")


_STOP = ord(".")
_UNKNOWN = (_unknown, 0)
_OPERATIONS: dict[int, tuple[Callable[[Machine], None], int]] = {
    ord(code): (operation, cost)
    for cost, operations in {
        COST: {
            b"\x80": _reads("<B", _protocol),
            b"\x95": lambda machine: machine.take(8),  # a frame's length
            b"0": _pop,
            b"1": lambda machine: machine.pop_mark(),
            b"2": lambda machine: machine.stack.append(machine.stack[-1]),
            b"N": _value(lambda: None),
            b"\x88": _value(lambda: True),
            b"\x89": _value(lambda: False),
            b"K": _reads("<B", _push),
            b"M": _reads("<H", _push),
            b"J": _reads("<i", _push),
            b"G": _reads(">d", _push),
            b"h": _reads("<B", _get),
            b"j": _reads("<I", _get),
            b"a": _last(1, Machine.extend),
            b"e": _marked(Machine.extend),
            b"s": _last(2, _set_items),
            b"u": _marked(_set_items),
            b"\x90": _marked(_add_items),
            b"b": _build,
            b"Q": _persistent,
        },
        2 * ITEM: {
            b"(": _mark,
            b"q": _reads("<B", _put),
            b"r": _reads("<I", _put),
            b"\x94": lambda machine: _put(machine, len(machine.memo)),
            b"\x8a": _reads("<B", _integer),
            b"\x8b": _reads("<I", _integer),
            b"T": _reads("<I", _latin1),
            b"U": _reads("<B", _latin1),
            b"X": _reads("<I", _utf8),
            b"\x8c": _reads("<B", _utf8),
            b"\x8d": _reads("<Q", _utf8),
            b"B": _reads("<I", _bytes),
            b"C": _reads("<B", _bytes),
            b"\x8e": _reads("<Q", _bytes),
            b"\x96": _reads("<Q", _bytes),
        },
        CONTAINER: {
            b"]": _value(list),
            b"}": _value(dict),
            b")": _value(tuple),
            b"\x8f": _value(set),
            b"t": _marked(_tuple),
            b"\x91": _marked(_frozenset),
            b"\x85": _last(1, _tuple),
            b"\x86": _last(2, _tuple),
            b"\x87": _last(3, _tuple),
            b"c": _global,
            b"\x93": _stack_global,
            b"R": _reduce,
            b"\x81": _reduce,
            b"\x92": _new_object_ex,
        },
    }.items()
    for code, operation in operations.items()
}
