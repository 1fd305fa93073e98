"""TensorFlow's checkpoints: files of TensorFlow are read exactly, and damaged or forged files are refused."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.interop import bundle
from transformer_xl.interop.bundle import crc32c, find_bundle, read_bundle

GOLDEN = Path(__file__).parents[1] / "golden" / "tensorflow"
POLYNOMIAL = 0x82F63B78


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    with zipfile.ZipFile(GOLDEN / "bundles.zip") as archive:
        archive.extractall(folder)
    return folder


def bytewise(data: bytes, register: int = 0xFFFFFFFF) -> int:
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ POLYNOMIAL * (register & 1)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this and the next two: RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_checksum_equals_known_values(data: bytes, checksum: int):
    assert crc32c(np.frombuffer(data, np.uint8)) == checksum


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000, 16383, 16384, 16385, 16389, 40001])
def test_checksum_equals_the_bytewise_one(size):
    data = np.random.default_rng(size).integers(0, 256, size + 1, dtype=np.uint8)[1:]
    assert crc32c(data) == bytewise(data.tobytes())


@pytest.mark.parametrize("name", ["types", "shards", "object"])
def test_values_equal_what_tensorflow_wrote(bundles, name):
    expected = {
        key.removeprefix(f"{name}/"): value
        for key, value in np.load(bundles / "expected.npz").items()
        if key.startswith(f"{name}/")
    }
    read = {key: value for key, value in read_bundle(bundles / name).items() if value is not None}
    assert read.keys() == expected.keys()
    for key, value in read.items():
        array = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
        np.testing.assert_array_equal(array, expected[key], strict=True)
        kind = key.rpartition("/")[2]
        assert str(value.dtype) == f"torch.{kind}" or kind in ("scalar", "empty", "one", "VARIABLE_VALUE")


@pytest.mark.parametrize(
    ("name", "others"),
    [("types", ["complex", "quarter", "text"]), ("object", ["_CHECKPOINTABLE_OBJECT_GRAPH"]), ("shards", [])],
)
def test_values_that_are_not_numbers_are_none(bundles, name, others):
    assert [name for name, value in read_bundle(bundles / name).items() if value is None] == others


def test_an_index_of_many_blocks_is_read(bundles):
    read = read_bundle(bundles / "names")
    assert [int(value) for value in read.values()] == [int(name[:3]) for name in read] == list(range(700))


def test_tensors_view_the_mapped_file(bundles):
    read = read_bundle(bundles / "shards")
    places = [read[f"shard_0/{kind}"].data_ptr() for kind in ("float32", "float64")]
    assert abs(places[1] - places[0]) < (bundles / "shards.data-00000-of-00003").stat().st_size


def test_writing_to_a_tensor_leaves_the_file_unchanged(bundles):
    name = "shard_0/float32"
    read = read_bundle(bundles / "shards")[name]
    before = read.clone()
    read += 1
    torch.testing.assert_close(read_bundle(bundles / "shards")[name], before, rtol=0, atol=0)


def test_a_variable_in_slices_is_refused(bundles):
    with pytest.raises(ValueError, match=r"slices\.index .* whole is partitioned into slices"):
        read_bundle(bundles / "slices")


@pytest.mark.parametrize("missing", ["shards.index", "shards.data-00001-of-00003"])
def test_a_missing_file_is_named(bundles, tmp_path, missing):
    shutil.copytree(bundles, tmp_path / "copy")
    (tmp_path / "copy" / missing).unlink()
    for make in (lambda path: None, Path.mkdir):
        make(tmp_path / "copy" / missing)
        with pytest.raises(FileNotFoundError, match=f"{missing} is missing, or no regular file"):
            read_bundle(tmp_path / "copy" / "shards")


@pytest.mark.parametrize("name", ["shards.index", "object.index", *(f"shards.data-0000{i}-of-00003" for i in range(3))])
def test_any_damage_is_detected(bundles, tmp_path, name):
    """Each byte is changed once, and the file is cut off at each byte."""
    shutil.copytree(bundles, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("names*"))
    whole, rng = (tmp_path / name).read_bytes(), np.random.default_rng(7)
    for place, byte in enumerate(whole):
        for damaged in (bytes([byte ^ rng.integers(1, 256)]) + whole[place + 1 :], b""):
            (tmp_path / name).unlink()
            (tmp_path / name).write_bytes(whole[:place] + damaged)
            with pytest.raises(ValueError, match=name):
                read_bundle(tmp_path / name.split(".")[0])


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def block(entries: Iterable[tuple[bytes, bytes]], compression: int = 0) -> bytes:
    """A table's block in which no key is shortened."""
    content = b"".join(b"\0" + varint(len(key)) + varint(len(value)) + key + value for key, value in entries)
    content += bytes(4) + b"\1\0\0\0" + bytes([compression])
    return content + masked(content)


def masked(data: bytes) -> bytes:
    crc = bytewise(data)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def message(**fields: int | bytes | list[bytes]) -> bytes:
    """A protocol buffer of fields named f1, f2, ...: numbers, texts, and a checksum as field 6."""
    out = b""
    for name, values in fields.items():
        number = int(name[1:]) << 3
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, int):
                out += varint(number) + varint(value)
            elif number == 6 << 3:
                out += varint(number | 5) + value
            else:
                out += varint(number | 2) + varint(len(value)) + value
    return out


VALUES = np.arange(6, dtype="<f4").tobytes()
HEADER = message(f1=1)


def entry(*shape: int, **changed: int | bytes) -> bytes:
    sizes = message(f2=[message(f1=size) for size in shape])
    return message(**{"f1": 1, "f2": sizes, "f5": len(VALUES), "f6": masked(VALUES), **changed})


def forge(folder: Path, entries: list[tuple[bytes, bytes]], *, compression: int = 0, repeats: int = 1) -> Path:
    """A checkpoint of any content whose checksums are right."""
    blocks, handles = b"", []
    for key, value in entries:
        written = block([(key, value)], compression)
        handles += [(b"k", varint(len(blocks)) + varint(len(written) - 5))] * repeats
        blocks += written
    footer = b""
    for part in ([], handles):
        written = block(part)
        footer += varint(len(blocks)) + varint(len(written) - 5)
        blocks += written
    prefix = folder / "forged"
    magic = 0xDB4775248B80FB57.to_bytes(8, "little")
    (folder / "forged.index").write_bytes(blocks + footer.ljust(40, b"\0") + magic)
    (folder / "forged.data-00000-of-00001").write_bytes(VALUES)
    return prefix


def test_a_checkpoint_written_here_is_read(tmp_path):
    read = read_bundle(forge(tmp_path, [(b"", HEADER), (b"a/b", entry(2, 3))]))
    torch.testing.assert_close(read, {"a/b": torch.arange(6.0).view(2, 3)})


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ([(b"a", entry(6))], "it has no header"),
        ([(b"", message(f1=1, f2=1)), (b"a", entry(6))], "written on a big-endian machine"),
        ([(b"", HEADER), (b"a", entry(7))], r"a of shape \[7\] takes 24 bytes"),
        ([(b"", HEADER), (b"a", entry(2**62, f5=2**63))], "a has an absurd shape"),
        ([(b"", HEADER), (b"a", entry(2**63, 0, f5=0))], "a has an absurd shape"),
        ([(b"", HEADER), (b"a", entry(*[1] * 65, f5=4))], "a has an absurd shape"),
        ([(b"", HEADER), (b"a", entry(2**40, f5=2**42))], f"a takes {2**42} bytes from 0, and the file has 24"),
        ([(b"", HEADER), (b"a", entry(6, f4=2**63))], f"a takes 24 bytes from {2**63}"),
        ([(b"", HEADER), (b"a", entry(6, f4=4))], "a takes 24 bytes from 4"),
        ([(b"", HEADER), (b"a", entry(6, f3=1))], "a is in data file 1 of 1"),
        ([(b"", HEADER), (b"a", entry(6)[:-1])], "it is cut short"),
        ([(b"", HEADER), (b"a", b"\x0b")], "a field of an unknown kind"),
        ([(b"", HEADER), (b"a", b"\x08" + b"\xff" * 10)], "a number of more than 64 bits"),
        ([(b"", HEADER), (b"a", entry(6, f4=2**64))], "a number of more than 64 bits"),
        ([(b"", HEADER), (b"a\x1b[2J", entry(6))], r"it has the name 'a\\x1b\[2J'"),
        ([(b"", HEADER), (b"a" * 1001, entry(6))], "the block at .* is damaged"),
        ([(b"", HEADER), (b"\xff", entry(6))], "codec can't decode"),
    ],
)
def test_forged_indexes_are_refused(tmp_path, entries, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_bundle(forge(tmp_path, entries))


def test_tables_of_another_format_are_refused(tmp_path):
    entries = [(b"", HEADER), (b"a", entry(6))]
    with pytest.raises(ValueError, match=r"forged\.index .* it is compressed"):
        read_bundle(forge(tmp_path, entries, compression=1))
    with pytest.raises(ValueError, match="its blocks overlap"):
        read_bundle(forge(tmp_path, entries, repeats=2))
    os.truncate(tmp_path / "forged.index", 2**33)
    with pytest.raises(ValueError, match=r"it has 8,589,934,592 bytes"):
        read_bundle(tmp_path / "forged")
    (tmp_path / "forged.index").write_bytes(bytes(100))
    with pytest.raises(ValueError, match="does not end as an index does"):
        read_bundle(tmp_path / "forged")


def test_an_index_with_too_many_variables_is_refused(tmp_path, monkeypatch):
    prefix = forge(tmp_path, [(b"", HEADER)] + [(bytes([name]), entry(0, f5=0)) for name in b"abcd"])
    monkeypatch.setattr(bundle, "_VARIABLES", 5)
    with pytest.raises(ValueError, match="it has 5 variables or more"):
        read_bundle(prefix)


@settings(deadline=None, max_examples=examples(100))
@given(content=st.binary(max_size=64), value=st.binary(max_size=40))
def test_any_table_with_right_checksums_is_read_or_refused(tmp_path_factory, content, value):
    """Its blocks and messages may be any bytes."""
    folder = tmp_path_factory.mktemp("any")
    try:
        read_bundle(forge(folder, [(b"", HEADER), (b"a", value)]))
    except ValueError as error:
        assert "forged" in str(error)
    written = content + b"\0"
    start = len(written) + 4
    blocks = written + masked(written) + block([]) + block([(b"k", varint(0) + varint(len(content)))])
    handles = varint(start) + varint(8) + varint(start + 13) + varint(len(blocks) - start - 13 - 5)
    magic = 0xDB4775248B80FB57.to_bytes(8, "little")
    (folder / "forged.index").write_bytes(blocks + handles.ljust(40, b"\0") + magic)
    with pytest.raises(ValueError, match=r"forged\.index"):
        read_bundle(folder / "forged")
    shutil.rmtree(folder)


def empty_checkpoint(folder: Path, *steps: str) -> None:
    for step in steps:
        (folder / f"model.ckpt{step}.index").touch()


@pytest.mark.parametrize(
    "name", ["model.ckpt-9", "model.ckpt-9.index", "model.ckpt-9.meta", "model.ckpt-9.data-00000-of-00001"]
)
def test_any_file_of_a_checkpoint_leads_to_its_prefix(tmp_path, name):
    empty_checkpoint(tmp_path, "-9", "-10")
    assert find_bundle(tmp_path / name) == tmp_path / "model.ckpt-9"


def test_a_folder_leads_to_its_latest_checkpoint(tmp_path):
    empty_checkpoint(tmp_path, "")
    assert find_bundle(tmp_path) == tmp_path / "model.ckpt"
    empty_checkpoint(tmp_path, "-9", "-10")
    assert find_bundle(tmp_path) == tmp_path / "model.ckpt-10"


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no TensorFlow checkpoint: .*model\.ckpt\.index is missing"):
        find_bundle(tmp_path)
    with pytest.raises(FileNotFoundError, match="is no TensorFlow checkpoint"):
        find_bundle(tmp_path / "nowhere" / "model.ckpt-3")
    (tmp_path / ".index").touch()
    for place in (tmp_path, tmp_path / ".index"):
        with pytest.raises(FileNotFoundError, match=r"\.index\.index is missing"):
            find_bundle(place)
