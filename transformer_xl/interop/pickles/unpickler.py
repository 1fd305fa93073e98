"""Python's own unpickler, restricted: it runs no code of a file and has a limit on memory and time.

It has the operations of protocols 2 to 5. A name in a file is only compared with a list of names. Nothing is imported,
and only functions in that list are called.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping
from mmap import mmap
from typing import Any

from .inert import Name, Refusal, StandIn, check_tree, outside_name

BUDGET = 1 << 30
"""Limit on the estimated bytes of a file's objects. A vocabulary of 800,000 words uses 60 % of it."""
_READ, _KEY, _CALL = 64, 128, 2048
"""Bytes charged for a read, in addition to its text; for a key; and for a call, which may make a tensor."""
_LARGE = 1 << 20
"""Longer strings are read as empty strings."""
_LINE = 256
"""Maximum number of characters of a name."""
_NUMBERS = 4096
"""Maximum number of numeric keys in a file: a forged file can choose numbers with equal hashes (strings are safe)."""
_KEYS = {str, bytes, int, float, bool, type(None)}
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_OPERATIONS = b"(.012BCGJKMNQTUX])}acehjqt\x80\x85\x86\x87\x88\x89\x8a\x8c\x8d\x8e\x8f\x93\x94"
"""The operations whose code is Python's own."""


class Reader:
    """Reads a file from `position` to `end` for its unpicklers. Each read counts against the limit of the file."""

    def __init__(self, data: mmap, position: int, end: int):
        self.data: mmap = data
        self.position: int = position
        self.end: int = end
        self.left: int = BUDGET

    def spend(self, cost: int) -> None:
        """Charge `cost` bytes to the budget."""
        self.left -= cost
        if self.left < 0:
            raise Refusal(f"makes more than {BUDGET:,} bytes of objects: no model does. Do not trust this file.")

    def read(self, size: int) -> bytes:
        """The next `size` bytes; empty if there are more than 1 MiB."""
        start, self.position = self.position, self.position + size
        if self.position > self.end:
            raise EOFError("it ends within a value")
        if size > _LARGE:
            return b""
        self.spend(_READ + 4 * size)
        return self.data[start : self.position]

    def readline(self) -> bytes:
        """The next line, which is a name."""
        newline = self.data.find(b"\n", self.position, min(self.end, self.position + _LINE))
        if newline < 0:
            raise EOFError("a name has no end")
        return self.read(newline + 1 - self.position)


class Unpickler(pickle._Unpickler):
    """Reads one pickle.

    Args:
        names: every name that a pickle may use, as "module.name". A call is replaced by the function given here, with
            this unpickler and the arguments; None makes a stand-in.
        programs: modules. Any name in them or their submodules becomes a stand-in.
        persistent: returns the object with a persistent id. None refuses such ids.
    """

    stack: list[Any]
    memo: Any
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self,
        file: Reader,
        names: Mapping[str, Callable[..., Any] | None],
        programs: tuple[str, ...],
        persistent: Callable[[Any], Any] | None,
    ):
        super().__init__(file, encoding="latin-1")
        self.file: Reader = file
        self.names: Mapping[str, Callable[..., Any] | None] = names
        self.programs: tuple[str, ...] = programs
        self.persistent: Callable[[Any], Any] | None = persistent
        self.numbers: int = 0

    def value(self) -> Any:
        """Read the pickle, and return its value."""
        value = self.load()
        check_tree(value)
        return value

    def find_class(self, module: str, name: str) -> Name:
        """The allowed class or function with a name; any other name is refused."""
        module = _RENAMED.get(module, module)
        full = f"{module}.{name}"
        if full in self.names:
            return Name(full, self.names[full])
        known = any(f"{module}.".startswith(f"{program}.") for program in self.programs)
        if known and full.isascii() and all(map(str.isidentifier, (*module.split("."), name))):
            return Name(full)
        raise outside_name(full)

    def persistent_load(self, pid: Any) -> Any:
        """The object with a persistent id."""
        if self.persistent is None:
            raise outside_name("an object outside of the file")
        return self.persistent(pid)

    def check_keys(self, keys: Collection[Any]) -> Collection[Any]:
        """Return the keys of a dict or members of a set; refuse them if hashing could take long."""
        self.file.spend(_KEY * len(keys))
        self.numbers += sum(type(key) in (int, float) for key in keys)
        if self.numbers > _NUMBERS or not {type(key) for key in keys} <= _KEYS:
            raise Refusal(f"has keys of odd types, or above {_NUMBERS:,} numbers as keys. Do not trust this file.")
        return keys

    def _skip_frame(self) -> None:
        self.file.read(8)

    def _put(self) -> None:
        index = int.from_bytes(self.file.read(4), "little")
        if index > len(self.memo) + 1:  # picklers count from 0 or 1; other numbers could have equal hashes
            raise ValueError(f"memo {index}")
        self.memo[index] = self.stack[-1]

    def _call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(function) is not Name or type(arguments) is not tuple:
            raise ValueError("it calls what is no function")
        self.file.spend(_CALL)
        self.append(function.make(self, *arguments) if function.make else StandIn(function.name, arguments))

    def _build(self) -> None:
        """Set the state of a stand-in. The states of other objects are ignored: no weight or vocabulary needs them."""
        state = self.stack.pop()
        if type(self.stack[-1]) is StandIn:
            self.stack[-1].attributes = state if type(state) is dict else {"state": state}

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        fill(self, self.stack[-1], [(key, value)])

    def _set_items(self) -> None:
        items = self.pop_mark()
        fill(self, self.stack[-1], list(zip(items[::2], items[1::2], strict=True)))

    def _add_items(self) -> None:
        items = self.pop_mark()
        self.stack[-1].update(self.check_keys(items))

    def _frozenset(self) -> None:
        items = self.pop_mark()  # this replaces the stack and its append
        self.append(frozenset(self.check_keys(items)))

    dispatch: dict[int, Any] = {code: pickle._Unpickler.dispatch[code] for code in _OPERATIONS} | {
        pickle.FRAME[0]: _skip_frame,
        pickle.BYTEARRAY8[0]: pickle._Unpickler.dispatch[pickle.BINBYTES8[0]],
        pickle.LONG_BINPUT[0]: _put,
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.ADDITEMS[0]: _add_items,
        pickle.FROZENSET[0]: _frozenset,
    }


def fill(unpickler: Unpickler, target: Any, pairs: list[Any]) -> Any:
    """Put these keys and values into a dict, and return it."""
    if type(target) is not dict:
        raise ValueError("it sets items of what is no dict")
    unpickler.check_keys([key for key, _ in pairs])
    target.update(pairs)
    return target
