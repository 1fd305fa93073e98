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
from collections import Counter, OrderedDict, defaultdict
from copy import deepcopy
from pathlib import Path, PosixPath

import hostile
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from transformer_xl.interop.pickles import unpickler
from transformer_xl.interop.pickles.inert import Name
from transformer_xl.interop.pickles.unpickle import StandIn, module_state, read_pickle

PROTOCOLS = range(2, 6)
FORMATS = {"zip": {}, "legacy": {"_use_new_zipfile_serialization": False}}

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
several = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def read(tmp_path):
    """Read a file of these bytes."""

    def from_bytes(content: bytes):
        (tmp_path / "file").write_bytes(content)
        return read_pickle(tmp_path / "file")

    return from_bytes


@pytest.fixture(autouse=True)
def smaller_limits(monkeypatch):
    monkeypatch.setattr(unpickler, "BUDGET", 1 << 24)


def refused(read, content: bytes, match: str = ".") -> str:
    with pytest.raises(ValueError, match=match) as refusal:
        read(content)
    message = str(refusal.value)
    assert "\n" not in message and "/file " in message and message.endswith(".") and len(message) < 400, message
    return message


def saved(value, **options) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def same(got, expected) -> None:
    """Check that values are equal, and that tensors have the same type and strides."""
    if isinstance(expected, dict):
        assert type(got) is dict and list(got) == list(expected)
        for key in expected:
            same(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(got) is type(expected) and len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and got.stride() == expected.stride()
        torch.testing.assert_close(got, expected.detach(), rtol=0, atol=0, equal_nan=True)
    else:
        assert type(got) is type(expected) and got == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
@several
@given(value=values)
def test_plain_data_is_restored(read, protocol, value):
    same(read(pickle.dumps(value, protocol=protocol)), value)
    same(read(pickle._dumps(value, protocol=protocol)), value)  # Python's own pickler uses the memo differently


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_other_dicts_become_plain_dicts_and_bytes_may_become_stand_ins(read, protocol):
    value = {"counter": Counter("hello"), "default": defaultdict(list, {"a": [1]}), b"a": b"a\xff\0"}
    if protocol > 2:
        assert read(pickle.dumps(value, protocol=protocol)) == {**value, "counter": dict(Counter("hello"))}
    kinds = {type(part) for part in read(pickle.dumps([bytearray(b"a\xff"), b"a\xff"], protocol=protocol))}
    assert kinds <= {StandIn, bytes}


READ = "import sys; from pathlib import Path; from transformer_xl.interop.pickles.unpickle import read_pickle as read; "


def test_a_vocabulary_of_300_000_words_is_read(tmp_path):
    words = [f"word{n}" for n in range(300_000)]
    vocab = {
        "idx2sym": words,
        "sym2idx": OrderedDict((word, n) for n, word in enumerate(words)),
        "counts": Counter(words),
    }
    (tmp_path / "vocab").write_bytes(pickle.dumps(vocab, protocol=2))
    check = READ + "got = read(Path(sys.argv[1])); print(*map(len, got.values()), got['sym2idx'][got['idx2sym'][-1]])"
    done = subprocess.run([sys.executable, "-c", check, tmp_path / "vocab"], capture_output=True, text=True)
    assert done.stdout.split() == ["300000"] * 3 + ["299999"], (
        done.stderr
    )  # in a process of its own, because checked types are slow


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


def test_a_dict_may_have_keys_of_every_plain_type(read):
    value = {"a": 0, b"b": 1, 2: 2, 2.5: 3, True: 4, None: 5}
    assert read(pickle.dumps(value)) == value


@pytest.mark.parametrize("value", [{"a": 1}, [True], (1.5,), "a", 2**70, re.compile("a")])
def test_a_pickle_of_protocol_0_is_refused(read, value):
    refused(read, pickle.dumps(value, protocol=0), "no pickle of protocol 2 to 5")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_of_other_programs_become_stand_ins(read, protocol):
    objects = [argparse.Namespace(d_model=8), re.compile("a+"), PosixPath("a/b"), np.arange(3), np.float32(1)]
    namespace, pattern, path, array, scalar = read(pickle.dumps(objects, protocol=protocol))
    assert namespace.attributes == {"d_model": 8} and pattern.arguments[0] == "a+" and path.arguments == ("a", "b")
    assert {type(value) for value in (namespace, pattern, path, array, scalar)} == {StandIn}
    assert "a+" not in repr(pattern) and "re._compile" in repr(pattern)


def test_stand_ins_hold_a_state(read):
    new = hostile.name("utils", "Bag") + b")\x81"
    assert read(new + b"}K\1K\2sb.").attributes == {1: 2}
    assert read(new + b"K\1K\2\x86b.").attributes == {"state": (1, 2)}
    assert read(hostile.name("utils", "Bag") + b".").name == "utils.Bag"


def test_long_strings_become_empty(read):
    size = (1 << 20) + 1
    long = {"bytes": bytes(size), "text": "a" * size, "short": b"a"}
    assert read(pickle.dumps(long, protocol=4)) == {"bytes": b"", "text": "", "short": b"a"}
    assert read(pickle.dumps(long, protocol=2))["bytes"].arguments == ("", "latin1")
    tokens = np.zeros(size // 8 + 1, np.int64)
    for protocol in PROTOCOLS:
        content = read(pickle.dumps({"train": tokens, "idx2sym": ["a"]}, protocol=protocol))
        assert type(content["train"]) is StandIn and content["idx2sym"] == ["a"]


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"]
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=4), view=st.integers(0, 3), seed=st.integers(0, 9))
def test_tensors_are_restored(read, options, dtype, shape, view, seed):
    torch.manual_seed(seed)
    tensor = (torch.randn(shape) * 5).to(getattr(torch, dtype))
    if view and tensor.dim():
        tensor = [tensor.movedim(0, -1), tensor[::2], tensor[1:]][view - 1]
    value = {"a": tensor, "again": [tensor, tensor.flatten()[:1]], "b": tensor > 0}
    content = saved(value, **options)
    got = read(content)
    same(got, torch.load(io.BytesIO(content), weights_only=True))
    assert got["a"] is got["again"][0]


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_tensors_share_storage_as_before_and_leave_the_file_unchanged(read, tmp_path, options):
    whole = torch.arange(12.0)
    parameter = nn.Parameter(torch.ones(2, requires_grad=True))
    content = saved({"whole": whole, "part": whole[3:6], "parameter": parameter}, **options)
    got = read(content)
    got["part"][0] = 100
    assert got["whole"][3] == 100 and not got["parameter"].requires_grad
    assert (tmp_path / "file").read_bytes() == content
    assert torch.mm(got["whole"].view(3, 4), got["whole"].view(4, 3)).shape == (3, 3)


def test_views_of_a_legacy_storage(read):
    """torch 0.4 wrote a storage that views another in this way."""
    part = hostile.storage(
        "0", 6, "FloatStorage", hostile.group(hostile.text("1"), hostile.number(2), hostile.number(4))
    )
    content = hostile.tensor(part, 1, (3,), (1,)) + b"."
    assert read(hostile.legacy(content, "0", hostile.six())).tolist() == [3, 4, 5]


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


@pytest.fixture
def elsewhere():
    """A module whose classes are in a program that is absent when the module is read."""
    place = types.ModuleType("mem_transformer")
    sys.modules[place.__name__] = place
    for owner in (Layer, MemTransformerLM):
        setattr(place, owner.__name__, owner)
        owner.__module__ = place.__name__
    yield MemTransformerLM()
    sys.modules.pop(place.__name__, None)


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_the_state_of_a_module_is_read_without_its_code(read, elsewhere, options):
    content = saved(elsewhere, **options)
    del sys.modules["mem_transformer"]
    if options:
        assert b"module" in content
    got = read(content)
    assert got.name == "mem_transformer.MemTransformerLM" and got.attributes["n_layer"] == 2
    same(module_state(got), dict(elsewhere.state_dict()))
    assert "mem_transformer" not in sys.modules


def test_a_module_not_built_as_torch_builds_them_is_refused():
    def module(**modules):
        return StandIn("A", (), {"_parameters": {}, "_buffers": {}, "_modules": modules})

    cycle = module()
    cycle.attributes["_modules"]["me"] = cycle
    with pytest.raises(ValueError, match=r"at 'me\.me\.me"):
        module_state(cycle)
    for broken in (
        module(a=3),
        module(a=Name("mem_transformer.MemTransformerLM")),
        StandIn("A"),
        StandIn("A", (), {"_parameters": {"a": "b"}}),
    ):
        with pytest.raises(ValueError, match=r"A at '' has not, so it is none of torch's"):
            module_state(broken)
    with pytest.raises(ValueError, match=r"B at 'a\.b\.' has not"):
        module_state(module(a=module(b=StandIn("B"))))


@pytest.mark.parametrize("passing", [None, 5, "b", StandIn("A"), torch.ones(2), ["b"], {"b": 1}, {"c"}, {1}])
def test_a_malformed_list_of_non_persistent_buffers_is_ignored(passing):
    parts = {"_parameters": {}, "_buffers": {"b": torch.ones(1), "n": None}, "_modules": {}}
    assert module_state(StandIn("A", (), parts | {"_non_persistent_buffers_set": passing})).keys() == {"b"}
    assert not module_state(StandIn("A", (), parts | {"_non_persistent_buffers_set": frozenset("b")}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of hostile files, smaller than real ones."""
    place = tmp_path_factory.mktemp("hostile")
    hostile.write(place / "files", f"touch {place / 'canary'}", many=3 * 10**4)
    "".encode("cp437")  # zipfile imports this codec
    return place


@pytest.mark.parametrize("title", hostile.files(1))
def test_a_hostile_file_is_refused_in_one_sentence_and_does_nothing(folder, title):
    before = set(sys.modules)
    with pytest.raises(ValueError) as refusal:
        content = read_pickle(folder / "files" / title)
        assert title.startswith("module-")
        module_state(content)
    message = str(refusal.value)
    begin = "A pickled module must " if title.startswith("module-") else f"{folder / 'files' / title} "
    assert message.startswith(begin) and re.fullmatch(r"[^\n]{10,300}\.", message.removeprefix(begin)), message
    if re.match("(zip-|legacy-)?call(?!-of)|nested|form-", title):
        assert "asks for" in message and "Do not trust this file." in message
    assert not (folder / "canary").exists()
    assert set(sys.modules) == before


def test_python_executes_the_hostile_files(tmp_path):
    """Python's own unpickler executes what this reader refuses."""
    for title in ("call-posix.system", "call-builtins.eval", "nested-popped", "form-obj"):
        canary = tmp_path / title
        content = hostile.files(1)[title](f": > {canary}")
        subprocess.run([sys.executable, "-c", "import pickle, sys; pickle.load(sys.stdin.buffer)"], input=content)
        assert canary.exists(), title


def test_a_million_levels_do_not_crash_the_process(tmp_path):
    titles = ["deep-lists", "deep-tuples", "deep-key"]
    for title in titles:
        (tmp_path / title).write_bytes(hostile.structures(10**6)[title])
    check = (
        READ
        + "from contextlib import suppress\nfor path in sys.argv[1:]:\n with suppress(ValueError): read(Path(path))"
    )
    done = subprocess.run([sys.executable, "-c", check, *(tmp_path / title for title in titles)], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_values_nested_at_the_limit_can_be_shown_compared_and_copied(read):
    value = []
    for _ in range(99):
        value = [value]
    got = read(pickle.dumps(value))
    assert got == value and repr(got) == repr(value) and deepcopy(got) == got
    refused(read, pickle.dumps([value]), "nests deeper")


HONEST = {
    "plain": pickle.dumps({"a": ["b", (1, 2.5)], "c": {"d": None}, "e": Counter("aab")}, protocol=2),
    "framed": pickle.dumps({"a": ["b", (1, 2.5)], "c": {"d": None}, "e": Counter("aab")}, protocol=4),
    **{
        name: saved({"a": torch.arange(3.0), "b": [torch.ones(2, dtype=torch.int16)]}, **o)
        for name, o in FORMATS.items()
    },
}


@pytest.mark.parametrize("kind", HONEST)
@several
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(read, kind, data):
    content = HONEST[kind]
    read(content)
    refused(read, content[: data.draw(st.integers(0, len(content) - 1))])
    refused(read, content + data.draw(st.binary(min_size=1, max_size=9))) if kind != "zip" else None


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


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.lists(parts, max_size=25).map(b"".join) | st.binary(max_size=60))
def test_any_bytes_give_data_or_a_refusal(read, content):
    read_or_refused(read, content)
    read_or_refused(read, content + b".")
    read_or_refused(read, hostile.torch_zip(content + b"."))
    read_or_refused(read, hostile.legacy(content + b"."))


def read_or_refused(read, content: bytes) -> None:
    try:
        repr(read(content))
    except ValueError as refusal:
        assert "\n" not in str(refusal) and "/file " in str(refusal)


def test_files_of_another_kind_are_refused(read):
    from safetensors.torch import save

    for content in (save({"a": torch.ones(2)}), "\u00e9 text, in words".encode(), struct.pack("<Q", 99) + b"no pickle"):
        refused(read, content, "is cut short or damaged, or no pickle of protocol 2 to 5")


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes among the files")
def test_a_key_without_a_value_is_refused(read):
    refused(read, b"\x80\x02}(K\x01K\x02K\x03u.")


def test_pipes_folders_and_devices_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(FileNotFoundError, match=f"^{place} is missing, or no regular file"):
            read_pickle(place)


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), ValueError("cannot mmap an empty file")])
def test_a_file_that_cannot_be_mapped_is_refused_in_one_sentence(tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    (tmp_path / "file").write_bytes(b"N.")
    monkeypatch.setattr("mmap.mmap", fail)
    with pytest.raises(ValueError, match=r"/file cannot be mapped to memory .* Get it again, or more memory\.$"):
        read_pickle(tmp_path / "file")
