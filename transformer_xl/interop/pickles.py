"""Read a pickle, plain or of `torch.save`, as data: no class and no function that it names is looked up.

    zip      `torch.load(weights_only=True)`                                                    (torch >= 1.6)
    legacy   torch's reader with the `Unpickler` below: it names each layer's class in a way    (torch < 1.6)
             that `weights_only` does not read
    plain    the `Unpickler` alone, for vocabularies and corpora

An object of any class becomes a `StandIn`, which has its data. Only tables and tensors are made.
"""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor, _rebuild_tensor_v2

from ..mistake import Mistake, shortened

_LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
"""The magic number with which `torch.save` began a file."""


class StandIn:
    """An object of another program. It holds the object's data and has none of its code."""

    name = ""
    """The class with its module: "mem_transformer.MemTransformerLM"."""
    dump_patches = False
    """torch asks the class of a layer for it."""

    attributes: dict[str, object]
    """The object's state; empty if that is no dict."""

    def __new__(cls, *arguments: object) -> StandIn:
        made = super().__new__(cls)
        made.attributes = {}
        return made

    def __setstate__(self, state: object) -> None:
        self.attributes = state if isinstance(state, dict) else {}


def read_pickle(path: Path) -> object:
    """Read a plain pickle or a file of `torch.save`.

    Plain values, lists, tuples and dicts keep their types, tensors and parameters come to the CPU, and any other object
    is a `StandIn`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is cut short, damaged or of another kind.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, or no regular file. Get it, and all that belongs to it.")
    try:
        with path.open("rb") as file, warnings.catch_warnings(action="ignore"):  # torch's, of other versions
            start = file.read(len(_LEGACY))
            file.seek(0)
            if start.startswith(b"PK\3\4"):
                names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
                with torch.serialization.safe_globals([(_maker(name), name) for name in names]):
                    return torch.load(path, "cpu", weights_only=True, mmap=True)
            if start == _LEGACY:
                reader = SimpleNamespace(__name__="pickles", Unpickler=Unpickler, load=_load)
                return torch.load(path, "cpu", reader, weights_only=False)
            return _load(file)
    except Exception as error:  # pickle, zipfile and torch raise many errors for damaged files
        told = str(error).split("\n\n")  # torch's reason stands between two paragraphs of advice
        reason = shortened(f"{type(error).__name__}: {(told[-2] if 'weights_only' in told[-1] else told[0]).strip()}")
        raise Mistake(f"{path} is damaged, or no pickle ({reason}). Get it again, or name another file.") from error


def module_parts(module: StandIn, name: str = "") -> dict[str, StandIn]:
    """A pickled `nn.Module`, which has the name "", and its layers by their dotted names."""
    parts = {name: module}
    for child, value in _members(module, "_modules").items():
        if isinstance(value, StandIn):
            parts |= module_parts(value, f"{name}.{child}".removeprefix("."))
    return parts


def module_state(parts: Mapping[str, StandIn]) -> dict[str, Tensor]:
    """The state dict of a module of these parts, with shared arrays under each of their names."""
    return {
        f"{name}.{own}".removeprefix("."): value
        for name, part in parts.items()
        for own, value in (_members(part, "_parameters") | _members(part, "_buffers")).items()
        if isinstance(value, Tensor)
    }


def _members(part: StandIn, kind: str) -> dict[str, object]:
    found = part.attributes.get(kind)
    return found if isinstance(found, dict) else {}


@lru_cache(maxsize=1000)
def _maker(name: str) -> Callable[..., object]:
    """What makes the objects of a class, or the result of a function."""
    return _MADE.get(name) or type("StandIn", (StandIn,), {"name": name})


class Unpickler(pickle.Unpickler):
    """Python's own unpickler. What `find_class` returns is all that a file can call, and it never looks a name up."""

    def __init__(self, file: BinaryIO, **options: object):
        super().__init__(file, encoding="latin-1")

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        return _maker(f"{module}.{name}")


def _load(file: BinaryIO, **options: object) -> object:
    return Unpickler(file).load()


def _parameter(tensor: Tensor, *_: object) -> Tensor:
    return tensor


_MADE: dict[str, Callable[..., object]] = {
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": dict,
    "collections.defaultdict": lambda *_: {},
    "collections.deque": lambda *_: [],
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
}
"""What makes an object of these names, with the arguments in the file."""
