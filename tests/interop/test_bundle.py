"""TensorFlow's checkpoints: files of TensorFlow are read exactly, and damaged ones are refused."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.interop.bundle import find_bundle, read_bundle
from transformer_xl.mistake import Mistake

GOLDEN = Path(__file__).parents[1] / "golden" / "tensorflow"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    with zipfile.ZipFile(GOLDEN / "bundles.zip") as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.parametrize("name", ["types", "shards", "object"])
def test_fractions_equal_what_tensorflow_wrote(bundles, name):
    stored = np.load(bundles / "expected.npz")
    expected = {key.removeprefix(f"{name}/"): stored[key] for key in stored if key.startswith(f"{name}/")}
    read = read_bundle(bundles / name)
    assert expected.keys() <= read.keys()
    for key, array in expected.items():
        value = read[key]
        if array.dtype.kind != "f":
            assert value is None
            continue
        found = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
        np.testing.assert_array_equal(found, array, strict=True)
        kind = key.rpartition("/")[2]
        assert str(value.dtype) == f"torch.{kind}" or kind in ("scalar", "empty", "one", "VARIABLE_VALUE")


def test_an_index_of_many_blocks_is_read(bundles):
    assert [int(name[:3]) for name in read_bundle(bundles / "names")] == list(range(700))


def test_writing_to_a_tensor_leaves_the_file_unchanged(bundles):
    name = "shard_0/float32"
    read = read_bundle(bundles / "shards")[name]
    before = read.clone()
    read += 1
    torch.testing.assert_close(read_bundle(bundles / "shards")[name], before, rtol=0, atol=0)


def test_a_variable_in_slices_is_refused(bundles):
    with pytest.raises(ValueError, match="whole is partitioned into slices"):
        read_bundle(bundles / "slices")


@pytest.mark.parametrize("missing", ["shards.index", "shards.data-00001-of-00003"])
def test_a_missing_file_is_named(bundles, tmp_path, missing):
    shutil.copytree(bundles, tmp_path / "copy")
    (tmp_path / "copy" / missing).unlink()
    with pytest.raises(FileNotFoundError, match=f"There is no file .*{missing}"):
        read_bundle(tmp_path / "copy" / "shards")


@given(data=st.data())
def test_a_damaged_index_gives_variables_or_a_sentence(bundles, tmp_path_factory, data):
    """Bytes are changed, and the file may be cut."""
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(bundles, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("names*"))
    whole = bytearray((folder / "shards.index").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (folder / "shards.index").write_bytes(whole[: data.draw(st.integers(len(whole) // 2, len(whole)))])
    try:
        read_bundle(folder / "shards")
    except (ValueError, FileNotFoundError) as error:
        assert "shards" in str(error) and "\n" not in str(error)
    shutil.rmtree(folder)


def test_a_data_file_that_is_cut_short_is_refused(bundles, tmp_path):
    shutil.copytree(bundles, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "shards.data-00000-of-00003"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"data-00000-of-00003 .* takes \d+ bytes from \d+ of"):
        read_bundle(tmp_path / "shards")


def test_files_of_another_kind_are_refused(bundles, tmp_path):
    index, version, big_endian = (bundles / "shards.index").read_bytes(), bytes.fromhex("1a020801"), b"\x10\1\x10\1"
    assert index.count(version) == 1
    (tmp_path / "big.index").write_bytes(index.replace(version, big_endian))
    with pytest.raises(Mistake, match=r"big\.index .*: it was written on a big-endian machine\. Copy"):
        read_bundle(tmp_path / "big")
    (tmp_path / "shards.index").write_bytes(index)
    (tmp_path / "shards.data-00000-of-00003").mkdir()
    with pytest.raises(Mistake, match=r"00000-of-00003 must be a file, and is a folder, a pipe"):
        read_bundle(tmp_path / "shards")
    (tmp_path / "folder.index").mkdir()
    with pytest.raises(Mistake, match=r"folder\.index must be a file, and is a folder, a pipe"):
        find_bundle(tmp_path / "folder")
    (tmp_path / "other.index").write_bytes(bytes(100))
    with pytest.raises(ValueError, match="does not end as an index does"):
        read_bundle(tmp_path / "other")


@pytest.mark.parametrize("ending", ["", ".index", ".meta", ".data-00000-of-00001"])
def test_a_file_or_a_folder_leads_to_the_prefix_of_a_checkpoint(tmp_path, ending):
    with pytest.raises(FileNotFoundError, match=r"no TensorFlow checkpoint: .*model\.ckpt\.index is missing"):
        find_bundle(tmp_path)
    (tmp_path / "model.ckpt.index").touch()
    assert find_bundle(tmp_path) == tmp_path / "model.ckpt"
    for step in (9, 10):
        (tmp_path / f"model.ckpt-{step}.index").touch()
    assert find_bundle(tmp_path) == tmp_path / "model.ckpt-10"
    assert find_bundle(tmp_path / f"model.ckpt-9{ending}") == tmp_path / "model.ckpt-9"
