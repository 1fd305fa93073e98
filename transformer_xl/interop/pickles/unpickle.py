"""Reads what other programs pickled as inert data: a plain pickle, or a file of `torch.save`. Nothing is executed.

    zip      NAME/data.pkl with persistent ids ("storage", type, key, location, numel), NAME/data/KEY   (torch >= 1.6)
    legacy   pickles of a magic number, a protocol, the system, the object and the keys of its storages,
             then for each storage its number of elements and its bytes; ids have a sixth member, a view, or are
             ("module", class, file, source)                                                     (torch 0.1.10 to 1.5)

Tensors view the memory-mapped file, and writes to them do not reach it. In a legacy file the offset of a storage may be
no multiple of its elements' size; such a storage is copied.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...mistake import Mistake
from .inert import Damage, Name, Omitted, Refusal, StandIn, map_file
from .machine import Machine

__all__ = ["Omitted", "StandIn", "module_state", "read_pickle"]

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_DIRECTORY = 1 << 22
"""Bytes that a zip file's directory may have: about 50,000 entries."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_COUNT, _NUMEL, _DIMENSIONS = 1 << 48, 1 << 60, 64
_TENSOR_COST = 1 << 11
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
"""The authors' modules and NVIDIA's, torch's own layers, Hugging Face's and what their tokenizers use."""


class _Storage:
    """The elements of tensors, and the tensors that wait for them, each with offset, sizes and strides."""

    def __init__(self, dtype: torch.dtype, numel: int):
        self.dtype, self.numel = dtype, numel
        self.tensors: list[tuple[Tensor, int, tuple[int, ...], tuple[int, ...]]] = []


class _View(NamedTuple):
    storage: _Storage
    start: int
    length: int


def read_pickle(path: Path) -> Any:
    """The content of a plain pickle or of a file of `torch.save`, as inert data.

    Plain values, lists, tuples and sets stay what they are. A dict of any kind becomes a dict, a tensor or parameter a
    tensor on the CPU, any other object a `StandIn`, and a string of more than 1 MiB an `Omitted`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: one sentence: it is cut short, damaged or of another kind, or asks for what is no part of a model.
    """
    data = map_file(path)
    try:
        return _read(data)
    except Refusal as refusal:
        raise Mistake(f"{path} {refusal}") from None


def module_state(module: StandIn) -> dict[str, Tensor]:
    """The state dict of a pickled `nn.Module`. A shared array is under each of its names.

    Raises:
        ValueError: one sentence: it is not built as torch builds modules.
    """
    state: dict[str, Tensor] = {}
    todo, count = [("", module)], 0
    while todo:
        prefix, module = todo.pop()
        passing, inner = module.attributes.get("_non_persistent_buffers_set"), []
        passing = passing if isinstance(passing, set | frozenset) else ()
        for kind, wanted in (("_parameters", Tensor), ("_buffers", Tensor), ("_modules", StandIn)):
            for name, value in _members(module, kind, wanted, prefix).items():
                full, count = f"{prefix}{name}", count + 1
                if count > _ARRAYS or len(full) > _LONGEST_NAME or not full.isprintable():
                    raise Mistake(
                        f"A pickled module must have at most {_ARRAYS:,} arrays and modules, and names of at most "
                        f"{_LONGEST_NAME:,} printable characters. It has more at {full[:60]!a}: no model does."
                    )
                if isinstance(value, StandIn):
                    inner.append((f"{full}.", value))
                elif value is not None and not (kind == "_buffers" and name in passing):
                    state[full] = value
        todo += reversed(inner)
    return state


def _members(module: StandIn, kind: str, wanted: type, prefix: str) -> dict[str, Any]:
    members = module.attributes.get(kind)
    if type(members) is not dict or any(
        type(name) is not str or not isinstance(value, wanted | None) for name, value in members.items()
    ):
        raise Mistake(
            f"A pickled module is none of torch's at {prefix.rstrip('.')[:60] or 'its top'} ({module.name}): "
            f"its {kind} must be {wanted.__name__}s by name."
        )
    return members


def _read(data: mmap.mmap) -> Any:
    if data[:4] == b"PK\3\4":
        return _read_zip(data)
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data) - 8:
        raise Refusal("is a safetensors file, not a pickle. Name a pickle or a file of torch.save.")
    machine = Machine(data, _NAMES, _PROGRAMS)
    value, end = machine.run(0, len(data))
    if type(value) is int and value == _MAGIC:
        return _read_legacy(machine, end)
    if end != len(data):
        raise Damage(f"{len(data) - end:,} bytes follow its end")
    return value


def _read_legacy(machine: Machine, position: int) -> Any:
    """The rest of a legacy file, after its first pickle."""
    data, storages = machine.data, _Storages()
    protocol, position = machine.run(position, len(data))
    system, position = machine.run(position, len(data))
    if type(protocol) is not int or protocol != _PROTOCOL:
        raise Damage("it has no protocol of torch")
    if type(system) is not dict or system.get("little_endian") is not True:
        raise Refusal("was written by a big-endian machine, whose files are not read. Save it again elsewhere.")
    machine.persistent = storages.find
    value, position = machine.run(position, len(data))
    keys, position = machine.run(position, len(data))
    if type(keys) is not list or len(keys) != len(storages) or set(map(_as_key, keys)) != storages.keys():
        raise Damage("its list of storages does not match its tensors")
    spans = {}
    for key in keys:
        size = storages[key].numel * storages[key].dtype.itemsize
        if data[position : position + 8] != storages[key].numel.to_bytes(8, "little"):
            raise Damage("it ends within its tensors, or they have other sizes")
        spans[key] = position + 8, size
        position += 8 + size
    if position != len(data):
        raise Damage(f"it should have {position:,} bytes, and has {len(data):,}")
    storages.fill(data, spans)
    return value


def _as_key(key: Any) -> str:
    if type(key) is not str:
        raise Damage("a storage's key is no text")
    return key


def _read_zip(data: mmap.mmap) -> Any:
    entries, storages = _entries(data), _Storages()
    found = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(found) != 1:
        raise Refusal("is a zip file that torch did not write: it must hold one NAME/data.pkl. Name another file.")
    folder = found[0].removesuffix("data.pkl")
    start, size = entries.get(f"{folder}byteorder", (0, 0))
    if size and data[start : start + size] != b"little":
        raise Refusal("was written by a big-endian machine, whose files are not read. Save it again elsewhere.")
    start, size = entries[found[0]]
    value, end = Machine(data, _NAMES, _PROGRAMS, storages.find).run(start, start + size)
    if end != start + size:
        raise Damage("bytes follow the end of its data.pkl")
    storages.fill(data, {name.removeprefix(f"{folder}data/"): span for name, span in entries.items()})
    return value


class _Directory:
    """A file for `zipfile`, which by itself would read a directory of any size at once."""

    def __init__(self, data: mmap.mmap):
        self.seek, self.tell, self._read = data.seek, data.tell, data.read

    def read(self, size: int | None = None) -> bytes:
        if size is not None and size > _DIRECTORY:
            raise Refusal(f"is a zip file with a directory of {size:,} bytes. Do not trust this file.")
        return self._read(size)


def _entries(data: mmap.mmap) -> dict[str, tuple[int, int]]:
    """The offset and size of each entry of a zip file. Entries that overlap are refused."""
    try:
        with zipfile.ZipFile(_Directory(data)) as archive:  # type: ignore[arg-type]
            infos, directory = archive.infolist(), archive.start_dir
    except Refusal:
        raise
    except (zipfile.BadZipFile, NotImplementedError, OSError, OverflowError, ValueError, struct.error):
        raise Damage("its directory of entries") from None
    entries, end = {}, 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise Refusal("is a zip file with a compressed entry, which torch never writes. Do not trust this file.")
        if info.filename in entries or info.header_offset < end:
            raise Refusal("is a zip file whose entries overlap or share a name. Do not trust this file.")
        header = data[info.header_offset : info.header_offset + _LOCAL_HEADER.size]
        if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\3\4":
            raise Damage("an entry is not where its directory says")
        _, name, extra = _LOCAL_HEADER.unpack(header)
        start = info.header_offset + _LOCAL_HEADER.size + name + extra
        end = start + info.file_size
        if end > directory or info.file_size != info.compress_size:
            raise Damage("an entry is longer than the file")
        entries[info.filename] = start, info.file_size
    return entries


class _Storages(dict[str, _Storage]):
    """The storages of a file, by key."""

    def find(self, key: Any) -> Name | _View:
        """The value of a persistent id of torch."""
        if type(key) is not tuple or not key or type(key[0]) is not str:
            raise Damage("a persistent id is none of torch's")
        if key[0] == "module" and len(key) == 4 and type(key[1]) is Name:
            return key[1]
        if key[0] != "storage" or len(key) not in (5, 6):
            raise Damage("a persistent id is none of torch's")
        _, kind, name, _, numel, view, *_ = (*key, None)
        dtype = _DTYPES.get(kind.name) if type(kind) is Name else None
        if dtype is None or not _is_count(numel):
            raise Damage("a storage has no type or size")
        start, length = (0, numel) if view is None else _view_span(view)
        storage = self.setdefault(_as_key(name), _Storage(dtype, numel))
        if (storage.dtype, storage.numel) != (dtype, numel) or start + length > numel:
            raise Damage("a storage has two types or sizes")
        return _View(storage, start, length)

    def fill(self, data: bytes | mmap.mmap, spans: Mapping[str, tuple[int, int]]) -> None:
        """Give the tensors their elements. `spans` has the offset of each storage in `data`, and its bytes."""
        for key, storage in self.items():
            position, size = spans.get(key, (0, -1))
            if storage.numel * storage.dtype.itemsize > size:
                raise Damage("a storage is missing, or shorter than its tensors")
            elements = _elements(data, storage.dtype, storage.numel, position)
            for tensor, offset, sizes, strides in storage.tensors:
                tensor.set_(elements, offset, sizes, strides)  # type: ignore[call-overload]


def _elements(data: bytes | mmap.mmap, dtype: torch.dtype, numel: int, position: int) -> Tensor:
    if not numel:
        return torch.empty(0, device="cpu", dtype=dtype)
    elements = torch.frombuffer(data, dtype=torch.uint8, count=numel * dtype.itemsize, offset=position)
    if position % dtype.itemsize:
        elements = elements.clone()  # kernels assume that elements are at multiples of their size
    if dtype is torch.bool and elements.max() > 1:
        raise Damage("a bool is neither true nor false")
    return elements.view(dtype)


def _view_span(view: Any) -> tuple[int, int]:
    """The start of a view of a storage, and its length."""
    if type(view) is not tuple or len(view) != 3 or not _is_count(view[1]) or not _is_count(view[2]):
        raise Damage("a view of a storage has no start or length")
    return view[1], view[2]


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < _COUNT


def _tensor(machine: Machine, arguments: tuple[Any, ...]) -> Tensor:
    """A tensor that waits for its elements."""
    if len(arguments) < 4 or type(arguments[0]) is not _View:
        raise Damage("a tensor has no storage")
    (storage, start, length), offset, sizes, strides = arguments[:4]
    if type(sizes) is not tuple or type(strides) is not tuple or not len(sizes) == len(strides) <= _DIMENSIONS:
        raise Damage("a tensor has no sizes")
    if not all(map(_is_count, (offset, *sizes, *strides))) or prod(max(1, size) for size in sizes) > _NUMEL:
        raise Damage("a tensor has a size that no tensor has")
    numel, last = prod(sizes), offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if numel and (numel > length or last >= length):
        raise Damage("a tensor is larger than its storage")
    machine.spend(_TENSOR_COST)
    tensor = torch.empty(0, device="cpu", dtype=storage.dtype)
    storage.tensors.append((tensor, start + offset if numel else 0, sizes, strides))
    return tensor


def _parameter(machine: Machine, arguments: tuple[Any, ...]) -> Tensor:
    if not arguments or type(arguments[0]) is not Tensor:
        raise Damage("a parameter has no tensor")
    return arguments[0]


def _size(machine: Machine, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(arguments) != 1 or type(arguments[0]) is not tuple:
        raise Damage("a size is no tuple")
    return arguments[0]


_NAMES: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.Size": _size,
    **{str(dtype): dtype for dtype in _STORAGES.values()},
    **dict.fromkeys((*_DTYPES, "torch.device", "numpy.ndarray", "numpy.dtype")),
    **dict.fromkeys(("re._compile", "_regex.compile", "regex._regex.compile")),
    **dict.fromkeys(("argparse.Namespace", "pathlib.PosixPath")),
    **dict.fromkeys(
        f"numpy.{core}.{name}"
        for core in ("core", "_core")
        for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
    ),
}
