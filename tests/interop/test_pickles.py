"""Reading gives the same data as unpickling, and executes nothing, for ordinary and hostile files."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import re
import struct
import subprocess
import sys
import types
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from pathlib import Path, PosixPath

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from transformer_xl.interop.pickles import StandIn, module_state, read_pickle

PROTOCOLS = range(2, 6)
FORMATS = {"zip": {}, "legacy": {"_use_new_zipfile_serialization": False}}
several = settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

keys = st.text() | st.booleans() | st.none() | st.floats(allow_nan=False) | st.integers(-(2**200), 2**200)
leaves = keys | st.frozensets(keys, max_size=3) | st.sets(keys, max_size=3)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | inner.map(lambda value: [value, {"again": value}])
    ),
    max_leaves=12,
)


@pytest.fixture
def read(tmp_path):
    """Read a file of these bytes."""

    def from_bytes(content: bytes):
        (tmp_path / "file").write_bytes(content)
        return read_pickle(tmp_path / "file")

    return from_bytes


def refused(read, content: bytes, match: str = "is cut short or damaged") -> None:
    with pytest.raises(ValueError, match=match) as refusal:
        read(content)
    message = str(refusal.value)
    assert "\n" not in message and "/file " in message and message.endswith(".") and len(message) < 400, message


def saved(value, **options) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


# Plain data, and the objects of other programs.


@pytest.mark.parametrize("protocol", PROTOCOLS)
@several
@given(value=values)
def test_plain_data_is_restored(read, protocol, value):
    for content in (pickle.dumps(value, protocol), pickle._dumps(value, protocol)):  # two uses of the memo
        assert read(content) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_vocabulary_of_any_protocol_is_read(read, protocol):
    value = {"counter": Counter("hello"), "default": defaultdict(list, {"a": [1]}), 2.5: 3, None: 5}
    assert read(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"\x80\2}q\1(U\3abcq\2K\1T\3\0\0\0d\xe9fK\2u.", {"abc": 1, "d\u00e9f": 2}),
        (b"\x80\2c__builtin__\nset\nq\1]q\2(K\1K\2e\x85Rq\3.", {1, 2}),
        (b"\x80\2ccollections\nOrderedDict\nq\1]q\2(]q\3(U\1aK\1e]q\4(U\1bK\2ee\x85q\5Rq\6.", {"a": 1, "b": 2}),
    ],
)
def test_pickles_of_python_2_are_read(read, content, value):
    assert read(content) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_of_other_programs_become_stand_ins(read, protocol):
    tokens = np.zeros(1 << 18, np.int64)
    objects = [argparse.Namespace(d_model=8), re.compile("a+"), PosixPath("a/b"), tokens, np.float32(1), b"a\xff"]
    namespace, pattern, path, array, scalar, data = read(pickle.dumps(objects, protocol))
    assert namespace.attributes == {"d_model": 8} and pattern.arguments[0] == "a+" and path.arguments == ("a", "b")
    assert all(isinstance(value, StandIn) for value in (namespace, pattern, path, array, scalar))
    assert isinstance(data, StandIn if protocol == 2 else bytes)
    assert repr(pattern) == "<StandIn of re._compile>"


# Files of torch.save: tensors, and modules without their code.


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "uint8"])
@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=4), view=st.integers(0, 3), seed=st.integers(0, 9))
def test_tensors_are_restored(read, options, dtype, shape, view, seed):
    torch.manual_seed(seed)
    tensor = (torch.randn(shape) * 5).to(getattr(torch, dtype))
    if view and tensor.dim():
        tensor = [tensor.movedim(0, -1), tensor[::2], tensor[1:]][view - 1]
    value = {"a": tensor, "again": [tensor, tensor.flatten()[:1]], "b": tensor > 0}
    got = read(saved(value, **options))
    for one, other in zip((got["a"], *got["again"], got["b"]), (tensor, *value["again"], value["b"]), strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    assert got["a"] is got["again"][0]


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_tensors_share_storage_as_before_and_leave_the_file_unchanged(read, tmp_path, options):
    whole = torch.arange(12.0)
    content = saved({"whole": whole, "part": whole[3:6], "parameter": nn.Parameter(torch.ones(2))}, **options)
    got = read(content)
    got["part"][0] = 100
    assert got["whole"][3] == 100 and torch.equal(got["parameter"], torch.ones(2))
    assert (tmp_path / "file").read_bytes() == content


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        self.register_parameter("bias", None)
        self.register_buffer("inv_freq", torch.rand(5))
        self.register_buffer("passing", torch.rand(5), persistent=False)


class MemTransformerLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_layer = 2
        self.layers = nn.ModuleList([Layer(), nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.LayerNorm(3))])
        self.projs = nn.ParameterList([nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(3))])
        self.r_w_bias = nn.Parameter(torch.randn(2))
        self.tied = self.layers[0]
        self.missing = None


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_the_state_of_a_module_is_read_without_its_code(read, monkeypatch, options):
    place = types.ModuleType("mem_transformer")
    monkeypatch.setitem(sys.modules, place.__name__, place)
    for owner in (Layer, MemTransformerLM):
        setattr(place, owner.__name__, owner)
        monkeypatch.setattr(owner, "__module__", place.__name__)
    module = MemTransformerLM()
    content = saved(module, **options)
    monkeypatch.delitem(sys.modules, "mem_transformer")
    assert (b"X\6\0\0\0module" in content) == bool(options)  # a legacy file refers to its classes
    got = read(content)
    assert got.name == "mem_transformer.MemTransformerLM" and got.attributes["n_layer"] == 2
    state, expected = module_state(got), module.state_dict()
    assert list(state) == list(expected) and all(torch.equal(state[name], expected[name]) for name in state)
    assert state["tied.weight"].data_ptr() == state["layers.0.weight"].data_ptr()
    assert "mem_transformer" not in sys.modules


def module(parameters=None, **modules) -> StandIn:
    made = StandIn()
    made.__setstate__({"_parameters": parameters or {}, "_buffers": {}, "_modules": modules})
    return made


def test_a_module_not_built_as_torch_builds_them_is_refused():
    cycle = module()
    cycle.attributes["_modules"]["me"] = cycle
    doubled = module()
    for _ in range(14):
        doubled = module(a=doubled, b=doubled, c=doubled)
    for broken, reason in (
        (cycle, r"at 'me\.me\.me"),
        (doubled, "at most 131,072 parts"),
        (module(a=3), "at '' has not"),
        (module({"a": "b"}), "at '' has not"),
        (module(a=module(b=StandIn())), r"at 'a\.b\.' has not"),
    ):
        with pytest.raises(ValueError, match=reason):
            module_state(broken)


@pytest.mark.parametrize("passing", [None, 5, "b", torch.ones(2), ["b"], {"b": 1}, {"c"}, {1}])
def test_only_a_set_of_names_says_which_buffers_pass(passing):
    made = module()
    made.attributes |= {"_buffers": {"b": torch.ones(1), "n": None}, "_non_persistent_buffers_set": passing}
    assert module_state(made).keys() == {"b"}
    made.attributes |= {"_non_persistent_buffers_set": {"b"}}
    assert not module_state(made)


# Files written by hand, as an attacker would.


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


def storage(key: str = "0", numel: int = 6, view: bytes = b"") -> bytes:
    return group(text("storage"), name("torch", "FloatStorage"), text(key), text("cpu"), number(numel), view) + b"Q"


def tensor(place: bytes, offset: int = 0, size: Sequence[int] = (2, 3), stride: Sequence[int] = (3, 1)) -> bytes:
    shape = group(*map(number, size)), group(*map(number, stride))
    return call("torch._utils", "_rebuild_tensor_v2", place, number(offset), *shape, b"\x89", b"N")


def torch_zip(content: bytes, data: bytes = bytes(24), method: int = 0) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for entry, value in [("data.pkl", content), ("version", b"3\n"), ("byteorder", b"little"), ("data/0", data)]:
            archive.writestr(f"archive/{entry}", value)
    return file.getvalue()


SYSTEM = pickle.dumps({"protocol_version": 1001, "little_endian": True}, protocol=2)
SIX = struct.pack("<q6f", 6, *range(6))


def legacy(content: bytes, keys: Sequence[str] = (), data: bytes = b"", system: bytes = SYSTEM) -> bytes:
    first = pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickle.dumps(1001, 2)
    return b"".join([*first, system, content, pickle.dumps(list(keys), 2), data])


def test_files_by_hand_are_read_if_they_are_right(read):
    """torch 0.4 wrote a storage that views another as the second one here."""
    assert read(torch_zip(b"\x80\2" + tensor(storage()) + b".")).shape == (2, 3)
    part = storage("0", 6, group(text("1"), number(2), number(4)))
    assert read(legacy(tensor(part, 1, (3,), (1,)) + b".", "0", SIX)).tolist() == [3, 4, 5]


CALLS = [
    *(("posix", "system"), ("nt", "system"), ("os", "system"), ("subprocess", "Popen"), ("functools", "partial")),
    *(("operator", "attrgetter"), ("importlib", "import_module"), ("torch.hub", "load"), ("torch", "load")),
    *(("torch.storage", "_load_from_bytes"), ("torch._utils", "import_module"), ("torch.jit", "load")),
    *(("pickle", "loads"), ("numpy", "load"), ("runpy", "run_path"), ("codecs", "decode"), ("utilsx", "run")),
    *((home, made) for home in ("builtins", "__builtin__") for made in ("eval", "exec", "getattr", "__import__")),
]


@pytest.mark.parametrize("called", CALLS, ids=".".join)
def test_a_file_that_asks_for_code_is_refused_and_nothing_runs(read, tmp_path, called):
    command = text(f"touch {tmp_path / 'canary'}")
    made = call(*called, command)
    for content in (
        made + b".",
        name(*called) + group(command) + b"\x81.",
        text(called[0]) + text(called[1]) + b"\x93" + group(command) + b"R.",
        made + b"0N.",
        name("mem_transformer", "A") + b")\x81}" + text("vocab") + made + b"sb.",
        torch_zip(b"\x80\2" + made + b"."),
        torch_zip(b"\x80\2" + group(tensor(storage()), made) + b"."),
        torch_zip(group(text("storage"), name(*called), text("0"), text("cpu"), number(6)) + b"Q."),
        legacy(made + b"."),
        legacy(b"N.", system=made + b"."),
        legacy(b"N.")[: -len(pickle.dumps([], 2))] + made + b".",
        legacy(group(text("module"), name(*called), command, command) + b"Q)R."),
    ):
        refused(read, content, "asks for .* nothing of it was run. Do not trust this file")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "content",
    [
        call("utils", "get", text("os")) + group(text("system")) + b"R.",  # what a call returned is called
        text("os.system") + group(text("ls")) + b"R.",
        b"(" + text("ls") + b"iposix\nsystem\n.",
        b"\x82\1" + group(text("ls")) + b"R.",  # a name registered for extensions
        b"Pls\n.",
        b"\x80\5\x97.",  # a buffer outside of the file
    ],
)
def test_other_ways_to_call_are_no_part_of_the_reader(read, content):
    refused(read, content)
    refused(read, torch_zip(b"\x80\2" + content))
    refused(read, legacy(content))


def test_an_object_outside_of_the_file_is_refused(read):
    refused(read, text("ls") + b"Q.", "asks for an object outside of the file")


def test_python_executes_such_files(tmp_path):
    content = call("posix", "system", text(f"touch {tmp_path / 'canary'}")) + b"0N."
    subprocess.run([sys.executable, "-c", "import pickle, sys; pickle.load(sys.stdin.buffer)"], input=content)
    assert (tmp_path / "canary").exists()


SIZES = {
    "storage": tensor(storage(numel=1 << 40), size=(1 << 40,), stride=(1,)),
    "negative": tensor(storage(numel=-6)),
    "too large": tensor(storage(), size=(3, 3)),
    "stride": tensor(storage(), stride=(1 << 40, 1)),
    "offset": tensor(storage(), offset=1),
    "offset below 0": tensor(storage(), offset=-1),
    "size below 0": tensor(storage(), size=(-2, -3)),
    "no storage": tensor(text("0")),
}


@pytest.mark.parametrize("case", SIZES)
def test_a_tensor_outside_of_its_storage_is_refused(read, case):
    refused(read, torch_zip(b"\x80\2" + SIZES[case] + b"."))
    refused(read, legacy(SIZES[case].replace(b"tQ", b"NtQ") + b".", "0", SIX))


BOMBS = {
    "zeros": torch_zip(b"(" + b"N" * 10**6 + b"t.", method=zipfile.ZIP_DEFLATED),
    "data": torch_zip(tensor(storage()) + b".", bytes(10**7), zipfile.ZIP_DEFLATED),
    "many": b"(" + b"}" * 10**7 + b"t.",
    "memo": b"Nr" + struct.pack("<I", 1 << 31) + b".",
    "bytes": b"\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
    "bytearray": b"\x96" + struct.pack("<Q", 1 << 36) + b"x.",
    "text": b"X" + struct.pack("<I", (1 << 32) - 1) + b"x.",
    "frame": b"\x80\4\x95" + struct.pack("<Q", 1 << 36),
    "lists": b"]" * 400_000 + b"a" * 399_999 + b".",
    "tuples": b")" + b"\x85" * 10**6 + b".",
    "key": b"})" + b"\x85" * 10**6 + b"Ns.",
    "set": b"()" + b"\x85" * 10**6 + b"\x91.",
}


def test_bombs_take_little_memory_and_do_not_end_the_process(tmp_path):
    for title, content in BOMBS.items():
        (tmp_path / title).write_bytes(content)
    program = """
import resource, sys
from pathlib import Path
from transformer_xl.interop import pickles
pickles._LARGEST = 1 << 20
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for file in map(Path, sys.argv[1:]):
    try:
        pickles.read_pickle(file)
        print(file.name)
    except ValueError as refusal:
        assert "\\n" not in str(refusal)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024 < 500)
"""
    files = [tmp_path / title for title in BOMBS]
    done = subprocess.run([sys.executable, "-c", program, *files], capture_output=True, text=True)
    assert done.stdout.split() == ["memo", "lists", "tuples", "True"], done.stderr


HONEST = {
    "plain": pickle.dumps({"a": ["b", (1, 2.5)], "c": {"d": None}, "e": Counter("aab")}, protocol=2),
    "framed": pickle.dumps({"a": ["b", (1, 2.5)], "c": {"d": None}, "e": Counter("aab")}, protocol=4),
    **{
        title: saved({"a": torch.arange(3.0), "b": [torch.ones(2, dtype=torch.int16)]}, **options)
        for title, options in FORMATS.items()
    },
}


@pytest.mark.parametrize("kind", HONEST)
@several
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(read, kind, data):
    content = HONEST[kind]
    read(content)
    refused(read, content[: data.draw(st.integers(0, len(content) - 1))])


@pytest.mark.parametrize("kind", HONEST)
@several
@given(data=st.data())
def test_changed_bytes_give_data_or_a_refusal(read, kind, data):
    content = bytearray(HONEST[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    read_or_refused(read, bytes(content))


OPCODES = b"(.012JKMNQRTUXabcehjqrstu]})\x80\x81\x85\x86\x87\x88\x89\x8a\x8c\x8e\x8f\x90\x91\x92\x93\x94\x95\x96"
parts = st.one_of(
    st.sampled_from([bytes([code]) for code in OPCODES]),
    st.sampled_from([b"ccollections\nOrderedDict\n", b"c__builtin__\nset\n", b"cutils\nA\n", b"q\0", b"h\0", b"K\1"]),
    st.sampled_from(
        [b"ccopy_reg\n_reconstructor\n", b"c_codecs\nencode\n", b"\x8c\6latin1", b"ctorch\nSize\n", b"U\1a"]
    ),
    st.binary(max_size=4),
)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.lists(parts, max_size=25).map(b"".join) | st.binary(max_size=60))
def test_any_bytes_give_data_or_a_refusal(read, content):
    for whole in (content, content + b".", torch_zip(b"\x80\2" + content + b"."), legacy(content + b".")):
        read_or_refused(read, whole)


def read_or_refused(read, content: bytes) -> None:
    try:
        repr(read(content))
    except ValueError as refusal:
        assert "\n" not in str(refusal) and "/file " in str(refusal)


def test_files_of_another_kind_are_refused(read):
    from safetensors.torch import save

    for content in (b"", save({"a": torch.ones(2)}), "\u00e9 text, in words".encode(), b"\x1f\x8b\x08\0" + bytes(99)):
        refused(read, content, "is cut short or damaged, or no pickle of protocol 2 to 5")


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes among the files")
def test_pipes_folders_and_devices_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(FileNotFoundError, match=f"^{place} is missing, or no regular file"):
            read_pickle(place)
