"""Reading gives the same data as unpickling, and executes nothing, for ordinary and hostile files."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import re
import struct
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path, PosixPath

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from transformer_xl.interop.pickles import StandIn, read_pickle

PROTOCOLS = range(2, 6)
FORMATS = {"zip": {}, "legacy": {"_use_new_zipfile_serialization": False}}
few = settings(max_examples=examples(10))


@pytest.fixture
def read(tmp_path):
    """Read a file of these bytes."""

    def from_bytes(content: bytes):
        (tmp_path / "file").write_bytes(content)
        return read_pickle(tmp_path / "file")

    return from_bytes


def saved(value, **options) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


# Plain data, and the objects of other programs.


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_vocabulary_of_any_protocol_is_read(read, protocol):
    value = {"counter": Counter("hello"), "ids": OrderedDict(a=1, b=2), "symbols": ["a", ("b", None)], 2.5: 3**99}
    assert read(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"\x80\2}q\1(U\3abcq\2K\1T\3\0\0\0d\xe9fK\2u.", {"abc": 1, "d\u00e9f": 2}),
        (b"\x80\2ccollections\nOrderedDict\nq\1]q\2(]q\3(U\1aK\1e]q\4(U\1bK\2ee\x85q\5Rq\6.", {"a": 1, "b": 2}),
    ],
)
def test_pickles_of_python_2_are_read(read, content, value):
    assert read(content) == value


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_tables_and_lists_of_python_are_read(read, options):
    value = {"a": defaultdict(list, b=[1], c=[]), "d": deque([1, 2], 5)}
    assert read(saved(value, **options)) == {"a": {"b": [1], "c": []}, "d": [1, 2]}


class Table(dict):
    """A table of a class of its own, which torch's reader of zip files refuses."""


def test_the_sentence_has_torchs_reason(read):
    with pytest.raises(ValueError, match="UnpicklingError: Can only SETITEM for dict"):
        read(saved(Table(a=1)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_of_other_programs_become_stand_ins(read, protocol):
    objects = [argparse.Namespace(d_model=8), re.compile("a+"), PosixPath("a/b"), np.zeros(1 << 18), np.float32(1)]
    found = read(pickle.dumps(objects, protocol))
    assert all(isinstance(value, StandIn) for value in found)
    assert found[0].name == "argparse.Namespace" and found[0].attributes == {"d_model": 8}


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "uint8"])
@few
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


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def group(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def torch_zip(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for entry, value in [("data.pkl", content), ("version", b"3\n"), ("byteorder", b"little")]:
            archive.writestr(f"archive/{entry}", value)
    return file.getvalue()


def legacy(content: bytes) -> bytes:
    start = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True}]
    return b"".join([*(pickle.dumps(value, 2) for value in start), content, pickle.dumps([], 2)])


CALLS = [
    *(("posix", "system"), ("os", "system"), ("subprocess", "getoutput"), ("builtins", "eval"), ("pickle", "loads")),
    *(("torch.storage", "_load_from_bytes"), ("torch", "load"), ("__builtin__", "getattr"), ("utils", "run")),
]


@pytest.mark.parametrize("called", CALLS, ids=".".join)
def test_nothing_that_a_file_names_is_run(read, tmp_path, called):
    canary = tmp_path / "canary"
    command = text(f"open({str(canary)!r}, 'w')" if called[1] == "eval" else f"touch {canary}")
    made = name(*called) + group(command) + b"R"
    for content in (
        made + b".",
        name(*called) + group(command) + b"\x81.",
        text(called[0]) + text(called[1]) + b"\x93" + group(command) + b"R.",
        b"(" + command + b"i" + f"{called[0]}\n{called[1]}\n.".encode(),
        name("mem_transformer", "A") + b")\x81}" + text("vocab") + made + b"sb.",
        torch_zip(b"\x80\2" + made + b"."),
        torch_zip(group(text("storage"), name(*called), text("0"), text("cpu"), b"K\6") + b"Q."),
        legacy(made + b"."),
        legacy(b"N.").removesuffix(pickle.dumps([], 2)) + made + b".",  # in place of the keys of storages
        legacy(group(text("module"), name(*called), command, command) + b"Q)R."),
    ):
        read_or_refused(read, content)
    assert not canary.exists()


HONEST = {
    "plain": pickle.dumps({"a": ["b", (1, 2.5)], "c": {"d": None}, "e": Counter("aab")}, protocol=4),
    **{
        title: saved({"a": torch.arange(3.0), "b": [torch.ones(2, dtype=torch.int16)]}, **options)
        for title, options in FORMATS.items()
    },
}


@pytest.mark.parametrize("kind", HONEST)
@few
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(read, kind, data):
    content = HONEST[kind]
    read(content)
    with pytest.raises(ValueError, match="is damaged, or no pickle") as refusal:
        read(content[: data.draw(st.integers(0, len(content) - 1))])
    message = str(refusal.value)
    assert "\n" not in message and "/file " in message and message.endswith(".") and len(message) < 400, message


def read_or_refused(read, content: bytes) -> None:
    try:
        read(content)
    except ValueError as refusal:
        assert "\n" not in str(refusal) and "/file " in str(refusal)


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes among the files")
def test_files_of_another_kind_are_refused_at_once(read, tmp_path):
    for content in (b"", "\u00e9 text, in words".encode(), b"\x1f\x8b\x08\0" + bytes(99)):
        with pytest.raises(ValueError, match="is damaged, or no pickle"):
            read(content)
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(FileNotFoundError, match=f"^{place} is missing, or no regular file"):
            read_pickle(place)
