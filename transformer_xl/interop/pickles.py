"""Read a pickle, plain or of `torch.save`, as data: what another program's classes would do is never done.

    zip      NAME/data.pkl and NAME/data/KEY: `torch.load(weights_only=True)`, which runs no code    (torch >= 1.6)
    legacy   pickles of a magic number, a protocol, the system, the object, the keys of its
             storages, then their bytes: torch's reader with the `Unpickler` below             (torch 0.1.10 to 1.5)
    plain    one pickle of protocol 2 to 5, of a vocabulary or a corpus: the `Unpickler` alone

A legacy file refers to each layer by ("module", class, file, source), which `weights_only` does not read; therefore
the second unpickler. In all three a name must be one of a model, and its objects become `StandIn`s.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor

from ..mistake import Mistake, shortened

_PROGRAMS = (
    *("mem_transformer", "utils", "vocabulary", "data_utils", "proj_adaptive_softmax", "log_uniform_sampler"),
    *("torch.nn.modules", "torch.nn.backends", "torch.nn.parallel"),
    *("transformers", "pytorch_transformers", "pytorch_pretrained_bert", "tokenizers", "sacremoses"),
)
"""Modules of the authors and NVIDIA, torch's layers, Hugging Face's modules and the ones that its tokenizers use."""
_NAMES = {
    *("re._compile", "_regex.compile", "regex._regex.compile", "argparse.Namespace", "pathlib.PosixPath"),
    *(f"builtins.{name}" for name in ("object", "list", "dict", "tuple", "int", "float", "str", "bool", "bytes")),
    *("numpy.ndarray", "numpy.dtype", "torch.device", "_codecs.encode", "copyreg._reconstructor"),
    *(
        f"numpy.{core}.{name}"
        for core in ("core", "_core")
        for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
    ),
}
"""Other names whose objects become stand-ins."""
_LARGEST = 1 << 26
"""Maximum bytes of a pickle but for its arrays. Its objects take up to 80 times as many (a file of empty dicts), and
six times as many in a vocabulary, of which 800,000 words are 36 MB."""
_LONG, _LINE = 1 << 20, 256
_KEYS = {str, bytes, int, float, bool, type(None)}
_LAYERS, _PARTS = 16, 1 << 17
_MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)


class StandIn:
    """An object of another program. It holds the object's data and has none of its code."""

    name: str = ""
    """The class with its module: "mem_transformer.MemTransformerLM"."""

    def __init__(self, *arguments: Any):
        self.arguments: tuple[Any, ...] = arguments
        self.attributes: dict[Any, Any] = {}
        """The object's state. A state that is not a dict is under "state"."""

    def __setstate__(self, state: Any) -> None:
        self.attributes = state if type(state) is dict else {"state": state}

    def __repr__(self) -> str:
        return f"<StandIn of {self.name}>"


def read_pickle(path: Path) -> Any:
    """Read a plain pickle or a file of `torch.save`.

    Plain values, lists, tuples, sets and dicts keep their types, tensors and parameters come to the CPU, and any other
    object is a `StandIn`. In a file that is no zip, a string of more than 1 MiB, which is an array's bytes, is empty.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is cut short, damaged or of another kind, or names something that is not part of a model.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, or no regular file. Get it, and all that belongs to it.")
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of other versions and protocols
            start = file.read(len(_MAGIC))
            file.seek(0)
            if start.startswith(b"PK\3\4"):
                return _read_zip(path)
            if start == _MAGIC:
                reader = SimpleNamespace(__name__="pickles", Unpickler=Unpickler, load=_load)
                return torch.load(path, "cpu", reader, weights_only=False, encoding="latin-1")
            value = _load(file)
            if file.read(1):
                raise ValueError("bytes follow its end")
            return value
    except _Refusal as refusal:
        raise Mistake(f"{path} {refusal}") from None
    except Exception as error:  # pickle, zipfile and torch raise many errors for damaged files
        reason = shortened(f"{type(error).__name__}: {error}")
        raise Mistake(
            f"{path} is cut short or damaged, or no pickle of protocol 2 to 5 ({reason}). Get it again, or name "
            "another file."
        ) from error


def module_state(module: StandIn) -> dict[str, Tensor]:
    """The state dict of a pickled `nn.Module`, with shared arrays under each of their names.

    Raises:
        ValueError: the record is not a module of torch, or holds more than a model.
    """
    state: dict[str, Tensor] = {}
    for count, (name, value) in enumerate(_parts(module, "", 0)):
        if count >= _PARTS:
            raise Mistake(f"A pickled module must have at most {_PARTS:,} parts, and has more: no model does.")
        if isinstance(value, Tensor):
            state[name] = value
    return state


def _parts(module: StandIn, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The module, its arrays and the parts of its children, by name."""
    yield prefix, module
    passing = module.attributes.get("_non_persistent_buffers_set")
    passing = passing if isinstance(passing, set | frozenset) else ()
    for kind, wanted in (("_parameters", Tensor), ("_buffers", Tensor), ("_modules", StandIn)):
        members = module.attributes.get(kind)
        if (
            not isinstance(members, dict)
            or not all(type(name) is str and isinstance(value, wanted | None) for name, value in members.items())
            or depth > _LAYERS
        ):
            raise Mistake(
                f"A pickled module must have {kind} that are {wanted.__name__}s by name, at most {_LAYERS} levels "
                f"deep. {module.name} at {prefix[:60]!a} has not, so it is none of torch's."
            )
        for name, value in members.items():
            if isinstance(value, StandIn):
                yield from _parts(value, f"{prefix}{name}."[-256:], depth + 1)
            elif value is not None and not (kind == "_buffers" and name in passing):
                yield f"{prefix}{name}", value


class _Refusal(Mistake):
    """Why a file is refused: a sentence without its subject, the file."""


def _refuse(name: str) -> NoReturn:
    raise _Refusal(
        f"asks for {shortened(name)}, which is no part of a model: nothing of it was run. Do not trust this file."
    )


@lru_cache(maxsize=1000)
def _stand_in(name: str) -> type[StandIn]:
    """The class of the stand-ins for objects of a class; a name that is not of a model is refused."""
    known = name in _NAMES or any(name.startswith(f"{program}.") for program in _PROGRAMS)
    if not (known and name.isascii() and all(map(str.isidentifier, name.split(".")))):
        _refuse(name)
    return type("StandIn", (StandIn,), {"name": name})


def _read_zip(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        sizes = {info.filename.partition("/")[2]: info.file_size for info in archive.infolist()}
    if sum(sizes.values()) > path.stat().st_size or sizes["data.pkl"] > _LARGEST:
        raise _Refusal(f"unpacks to more than its size, or lists more than {_LARGEST:,} bytes. Do not trust this file.")
    others = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    allowed: list[Any] = [(_MADE[name] if name in _MADE else _stand_in(name), name) for name in others]
    with torch.serialization.safe_globals(allowed):
        return torch.load(path, "cpu", weights_only=True, mmap=True, encoding="latin-1")


class _Reader:
    """A file whose long strings are skipped, and whose other bytes have a limit."""

    def __init__(self, file: BinaryIO):
        self.file: BinaryIO = file
        self.left: int = _LARGEST

    def read(self, size: int) -> bytes:
        """The next bytes; none of them if there are more than 1 MiB."""
        if size > _LONG:
            self.file.seek(size, 1)
            return b""
        self.left -= size
        if self.left < 0:
            raise _Refusal(f"lists more than {_LARGEST:,} bytes beside its arrays: no model does. Do not trust it.")
        content = self.file.read(size)
        if len(content) < size:
            raise EOFError("it ends within a value")
        return content

    def readline(self) -> bytes:
        """The next line, which is a name."""
        line = self.file.readline(_LINE)
        if not line.endswith(b"\n"):
            raise EOFError("a name has no end")
        return line


def _load(file: BinaryIO, **options: Any) -> Any:
    return Unpickler(file).load()


class Unpickler(pickle._Unpickler):
    """Python's own unpickler, restricted: it sets the state of stand-ins alone.

    What `find_class` returns is all that a file can call.
    """

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: BinaryIO, **options: Any):
        self.reader: _Reader = _Reader(file)
        super().__init__(self.reader, encoding="latin-1")

    def find_class(self, module: str, name: str) -> Any:
        """What makes the objects of a class, or the result of a function; most names are refused."""
        full = f"{_RENAMED.get(module, module)}.{name}"
        return _MADE[full] if full in _MADE else _stand_in(full)

    def _skip_frame(self) -> None:
        self.reader.read(8)

    def _build(self) -> None:
        """Set the state of a stand-in. The states of other objects are ignored: no weight or vocabulary needs them."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], StandIn):
            self.stack[-1].__setstate__(state)

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse an object outside of the file. For a legacy file, torch puts its own function here."""
        _refuse("an object outside of the file")

    def _find(self) -> None:
        """The storage with a persistent id, or the class, which torch would compare with its source."""
        identity = self.stack.pop()
        self.append(identity[1] if identity[0] == "module" else self.persistent_load(identity))

    def _set_items(self) -> None:
        items = self.pop_mark()
        _fill(self.stack[-1], zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _fill(self.stack[-1], [(key, value)])

    def _add_items(self) -> None:
        items = self.pop_mark()
        self.stack[-1].update(_keys(items))

    def _frozenset(self) -> None:
        items = self.pop_mark()  # this replaces the stack and its append
        self.append(frozenset(_keys(items)))

    dispatch: dict[int, Any] = {
        code: pickle._Unpickler.dispatch[code]
        for code in b"(.012BCGJKMNRTUX])}acehjqrt\x80\x85\x86\x87\x88\x89\x8a\x8c\x8d\x8e\x8f\x93\x94"
    } | {
        pickle.FRAME[0]: _skip_frame,
        pickle.BYTEARRAY8[0]: pickle._Unpickler.dispatch[pickle.BINBYTES8[0]],
        pickle.NEWOBJ[0]: pickle._Unpickler.dispatch[pickle.REDUCE[0]],
        pickle.BUILD[0]: _build,
        pickle.BINPERSID[0]: _find,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.ADDITEMS[0]: _add_items,
        pickle.FROZENSET[0]: _frozenset,
    }


def _keys(keys: Collection[Any]) -> Collection[Any]:
    """Return what will be hashed: plain values, because a deep tuple would end the process."""
    if not {type(key) for key in keys} <= _KEYS:
        raise ValueError("a key is no plain value")
    return keys


def _fill(target: Any, pairs: Any) -> Any:
    if not isinstance(target, dict):
        raise ValueError("it sets items of what is no dict")
    pairs = list(pairs)
    _keys([key for key, _ in pairs])
    target.update(pairs)
    return target


def _tensor(storage: Any, offset: int, sizes: Any, strides: Any, *_: Any) -> Tensor:
    if prod(sizes) > storage.size():
        raise ValueError("a tensor is larger than its storage")
    return _rebuild_tensor(storage, offset, sizes, strides)


def _counter(content: Mapping[Any, int] | None = None) -> Counter[Any]:
    return Counter(content if isinstance(content, dict) else {})


def _first(value: Any, *_: Any) -> Any:
    return value


_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_MADE: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda pairs=(): _fill(OrderedDict(), pairs),
    "collections.Counter": _counter,
    "collections.defaultdict": lambda *_: {},
    "builtins.set": lambda members=(): set(_keys(members)),
    "builtins.frozenset": lambda members=(): frozenset(_keys(members)),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    **dict.fromkeys(("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"), _first),
    **dict.fromkeys(("torch.nn.parameter.Parameter", "torch.Size"), _first),
}
"""What makes an object of these names, with the arguments in the file."""
