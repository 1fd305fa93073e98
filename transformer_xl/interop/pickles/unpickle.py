"""Read a plain pickle or a file of `torch.save` as inert data. Nothing is executed.

    zip      NAME/data.pkl with persistent ids ("storage", type, key, location, numel), NAME/data/KEY   (torch >= 1.6)
    legacy   pickles of a magic number, a protocol, the system, the object and the keys of its storages,
             then for each storage its number of elements and its bytes; ids have a sixth member, a view, or are
             ("module", class, file, source)                                                     (torch 0.1.10 to 1.5)

Tensors are views of the memory-mapped file; writing to them does not change the file. A storage in a legacy file is
copied if its offset is not a multiple of the size of its elements.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Iterator
from math import prod
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...mistake import Mistake
from .inert import Refusal, StandIn, map_file, printable
from .unpickler import Reader, Unpickler, fill

__all__ = ["StandIn", "module_state", "read_pickle"]

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_DIMENSIONS = 64
_ARRAYS, _LONGEST_NAME = 1 << 17, 1000
_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}
_DTYPES = {
    f"{module}.{name}Storage": dtype for module in ("torch", "torch.cuda") for name, dtype in _STORAGES.items()
} | {f"torch.storage.{name}": torch.uint8 for name in ("TypedStorage", "UntypedStorage", "_UntypedStorage")}
_PROGRAMS = (
    *("mem_transformer", "utils", "vocabulary", "data_utils", "proj_adaptive_softmax", "log_uniform_sampler"),
    *("torch.nn.modules", "torch.nn.backends", "torch.nn.parallel"),
    *("transformers", "pytorch_transformers", "pytorch_pretrained_bert", "tokenizers", "sacremoses"),
)
"""Modules of the authors and NVIDIA, torch's layers, Hugging Face's modules and the ones that its tokenizers use."""


def read_pickle(path: Path) -> Any:
    """Read a plain pickle or a file of `torch.save` as inert data.

    Plain values, lists, tuples and sets keep their types. A dict of any kind becomes a dict, a tensor or parameter a
    tensor on the CPU, any other object a `StandIn`, and a string of more than 1 MiB an empty string.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is cut short, damaged or of another kind, or names something that is not part of a model.
    """
    data = map_file(path)
    try:
        return _read_zip(data) if data[:4] == b"PK\3\4" else _read_stream(data)
    except Refusal as refusal:
        raise Mistake(f"{path} {refusal}") from None
    except Exception as error:  # pickle, zipfile and torch raise many errors for damaged files
        reason = printable(f"{type(error).__name__}: {error}")
        raise Mistake(
            f"{path} is cut short or damaged, or no pickle of protocol 2 to 5 ({reason}). Get it again, or name "
            "another file."
        ) from error


def module_state(module: StandIn) -> dict[str, Tensor]:
    """The state dict of a pickled `nn.Module`, with shared arrays under each of their names.

    Raises:
        ValueError: the record is not a module of torch.
    """
    state: dict[str, Tensor] = {}
    for name, array in _arrays(module, ""):
        state[name] = array
        if len(state) > _ARRAYS:
            raise Mistake(f"A pickled module must have at most {_ARRAYS:,} arrays, and has more: no model does.")
    return state


def _arrays(module: StandIn, prefix: str) -> Iterator[tuple[str, Tensor]]:
    passing = module.attributes.get("_non_persistent_buffers_set")
    passing = passing if isinstance(passing, set | frozenset) else ()
    for kind, wanted in (("_parameters", Tensor), ("_buffers", Tensor), ("_modules", StandIn)):
        members = module.attributes.get(kind)
        if (
            type(members) is not dict
            or not all(type(name) is str and isinstance(value, wanted | None) for name, value in members.items())
            or len(prefix) > _LONGEST_NAME
        ):
            raise Mistake(
                f"A pickled module must have {kind} that are {wanted.__name__}s by name, and names of at most "
                f"{_LONGEST_NAME:,} characters. {module.name} at {prefix[:60]!a} has not, so it is none of torch's."
            )
        for name, value in members.items():
            if isinstance(value, StandIn):
                yield from _arrays(value, f"{prefix}{name}.")
            elif value is not None and not (kind == "_buffers" and name in passing):
                yield f"{prefix}{name}", value


def _value(file: Reader, storages: _Storages | None = None) -> Any:
    return Unpickler(file, _NAMES, _PROGRAMS, None if storages is None else storages.find).value()


def _read_stream(data: mmap) -> Any:
    """Read a plain pickle or a legacy file."""
    file = Reader(data, 0, len(data))
    value = _value(file)
    if type(value) is int and value == _MAGIC:
        return _read_legacy(file)
    if file.position != len(data):
        raise ValueError(f"{len(data) - file.position:,} bytes follow its end")
    return value


def _read_legacy(file: Reader) -> Any:
    """Read the rest of a legacy file, after its first pickle."""
    storages = _Storages()
    protocol, system = _value(file), _value(file)
    if protocol != _PROTOCOL or system["little_endian"] is not True:
        raise ValueError(f"it is of another protocol than {_PROTOCOL}, or of a big-endian machine")
    value, keys = _value(file, storages), _value(file)
    if type(keys) is not list or {type(key) for key in keys} - {str} or len(keys) != len(storages):
        raise ValueError("its list of storages does not match its tensors")
    position = file.position
    for storage in map(storages.__getitem__, keys):
        if file.data[position : position + 8] != storage.numel.to_bytes(8, "little"):
            raise ValueError("it ends within its tensors, or they have other sizes")
        size = storage.numel * storage.dtype.itemsize
        storage.fill(file.data, position + 8, size)
        position += 8 + size
    if position != len(file.data):
        raise ValueError(f"it should have {position:,} bytes, and has {len(file.data):,}")
    return value


def _read_zip(data: mmap) -> Any:
    entries, storages = {}, _Storages()
    with zipfile.ZipFile(data) as archive:  # type: ignore[arg-type]
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise Refusal("is a zip file with a compressed entry, which torch never writes. Name another file.")
            name, extra = struct.unpack_from("<HH", data, info.header_offset + 26)
            entries[info.filename.partition("/")[2]] = info.header_offset + 30 + name + extra, info.file_size
    start, size = entries["data.pkl"]
    file = Reader(data, start, start + size)
    value = _value(file, storages)
    if file.position != file.end:
        raise ValueError("bytes follow the end of its data.pkl")
    for key, storage in storages.items():
        storage.fill(data, *entries[f"data/{key}"])
    return value


class _Storage:
    """A storage, and the tensors that wait for its elements, with offsets, sizes and strides."""

    def __init__(self, dtype: torch.dtype, numel: int):
        self.dtype, self.numel = dtype, numel
        self.tensors: list[tuple[Tensor, int, tuple[int, ...], tuple[int, ...]]] = []

    def fill(self, data: mmap, position: int, size: int) -> None:
        """Give the tensors their elements: at most `size` bytes from `position` of `data`."""
        count = self.numel * self.dtype.itemsize
        if count > size:
            raise ValueError("a storage is shorter than its tensors")
        elements = torch.empty(0, dtype=torch.uint8, device="cpu")
        if count:
            elements = torch.frombuffer(data, dtype=torch.uint8, count=count, offset=position)
        if position % self.dtype.itemsize:
            elements = elements.clone()  # kernels need aligned elements
        elements = elements.view(self.dtype)
        for tensor, offset, sizes, strides in self.tensors:
            tensor.data = elements.as_strided(sizes, strides, offset)  # raises an error outside of the storage


class _View(NamedTuple):
    storage: _Storage
    start: int


class _Storages(dict[str, _Storage]):
    """The storages of a file, by key."""

    def find(self, key: Any) -> Any:
        """The object with a persistent id of torch: a class, or a view of a storage."""
        if key[0] == "module":
            return key[1]
        _, kind, name, _, numel, *views = key
        if type(name) is not str:
            raise ValueError("a storage's key is no text")
        storage = self.setdefault(name, _Storage(_DTYPES[kind.name], numel))
        return _View(storage, views[0][1] if any(views) else 0)


def _tensor(unpickler: Unpickler, view: Any, offset: int, sizes: Any, strides: Any, *_: Any) -> Tensor:
    """A tensor that waits for its elements."""
    if type(view) is not _View or len(sizes) > _DIMENSIONS or prod(sizes) > view.storage.numel:
        raise ValueError("a tensor is larger than its storage")
    tensor = torch.empty(0, device="cpu", dtype=view.storage.dtype)
    view.storage.tensors.append((tensor, view.start + offset, sizes, strides))
    return tensor


def _first(unpickler: Unpickler, value: Any, *_: Any) -> Any:
    return value


def _mapping(unpickler: Unpickler, content: Any = ()) -> dict[Any, Any]:
    return content if type(content) is dict else fill(unpickler, {}, list(content))


_NAMES: dict[str, Callable[..., Any] | None] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": lambda unpickler, *arguments: {},
    "builtins.set": lambda unpickler, members=(): set(unpickler.check_keys(members)),
    "builtins.frozenset": lambda unpickler, members=(): frozenset(unpickler.check_keys(members)),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    **dict.fromkeys(("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"), _first),
    **dict.fromkeys(("torch.nn.parameter.Parameter", "torch.Size"), _first),
    **dict.fromkeys(map(str, _STORAGES.values())),
    **dict.fromkeys((*_DTYPES, "torch.device", "numpy.ndarray", "numpy.dtype")),
    **dict.fromkeys(("re._compile", "_regex.compile", "regex._regex.compile")),
    **dict.fromkeys(("argparse.Namespace", "pathlib.PosixPath")),
    **dict.fromkeys(("copyreg._reconstructor", "_codecs.encode", "builtins.bytes", "builtins.bytearray")),
    **dict.fromkeys(f"builtins.{name}" for name in ("object", "list", "dict", "tuple", "int", "float", "str", "bool")),
    **dict.fromkeys(
        f"numpy.{core}.{name}"
        for core in ("core", "_core")
        for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
    ),
}
