"""Folders that the first house wrote keep working: the same weights, training state and numbers.

`golden/make_first_house.py` wrote the folders. Numbers are compared within rounding, because CPUs add in different
orders; weights and training state are compared exactly.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from golden.make_first_house import (
    GOLDEN,
    RUNS,
    SAVED,
    checkpoint,
    copied,
    exported,
    few_numbers,
    imported,
    measure,
    txl,
    working_in,
)
from safetensors.torch import load_file
from torch import Tensor

from transformer_xl import load_model

EXPECTED = json.loads((GOLDEN / "expected.json").read_text("utf-8"))
CLOSE = 1e-4
"""Relative, for all floats. float32 sums in another order (PyTorch's and MKL's without AVX2) changed none by more than
1e-5."""
CLOSE_MUON = 1e-3
"""Muon computes its orthogonal matrices in bfloat16, and the same change moved a gradient norm by 1.5e-4."""
TINY = 1e-30
"""Largest gradient norm of a run that is to keep its moments: it is lost in any moment but 0."""
KEPT = 1 - 1e-12
"""A decay of moments that rounds to 1 in float32."""


@pytest.fixture(scope="module", autouse=True)
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the golden folder, in which commands run. No test changes a folder of another."""
    folder = tmp_path_factory.mktemp("first") / "house"
    with working_in(copied(folder)):
        gc.freeze()  # training collects garbage often, which among all objects of a test run takes long
        yield folder
        gc.unfreeze()


def differences(found: Any, expected: Any, close: float, where: str = "") -> Iterator[str]:
    """A line for each value that is not the expected one."""
    if isinstance(expected, Mapping):
        if found.keys() != expected.keys():
            yield f"{where}: {sorted(found)}, not {sorted(expected)}"
        for key in found.keys() & expected.keys():
            yield from differences(found[key], expected[key], close, f"{where}/{key}")
    elif isinstance(expected, list):
        if len(found) != len(expected):
            yield f"{where}: {len(found)} entries, not {len(expected)}"
        for index, pair in enumerate(zip(found, expected, strict=False)):
            yield from differences(*pair, close, f"{where}/{index}")
    elif found != (pytest.approx(expected, rel=close) if isinstance(expected, float) else expected):
        yield f"{where}: {found!r}, not {expected!r}"


def same(found: Any, expected: Any, close: float = CLOSE) -> None:
    """Refuse numbers that are not those in expected.json."""
    wrong = list(differences(few_numbers(found), expected, close))
    assert not wrong, "\n".join(wrong)


def identical(found: Tensor, stored: Tensor, name: str) -> None:
    torch.testing.assert_close(found, stored, rtol=0, atol=0, msg=lambda told: f"{name}: {told}")


def under_its_name(tensors: Mapping[str, Tensor], weight: str, before: str = "", after: str = "") -> Tensor:
    """The only tensor whose name is `before`, the name of a weight, and `after`. A module may have moved into another:
    anything may stand in front of the first house's name of the weight."""
    pattern = re.compile(rf"{re.escape(before)}(.+\.)?{re.escape(weight + after)}")
    names = [name for name in tensors if pattern.fullmatch(name)]
    assert len(names) == 1, f"{before}{weight}{after} must be one of {sorted(tensors)}, and {names} are like it"
    return tensors[names[0]]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_the_same_numbers(name: str):
    expected = {key: value for key, value in EXPECTED["runs"][name].items() if key != "owners"}
    same(measure(name), expected, CLOSE_MUON if name == "muon" else CLOSE)


@pytest.mark.parametrize("name", RUNS)
def test_weights_are_those_that_were_stored(name: str):
    stored = load_file(Path(checkpoint(name), "model.safetensors"))
    loaded = load_model(checkpoint(name)).model.state_dict()
    for weight, value in stored.items():
        identical(under_its_name(loaded, weight), value, weight)
    pointers = {value.data_ptr() for value in loaded.values()}
    assert len(pointers) == len(stored), "tied weights are stored once, and every other one has a tensor of its own"


def keep_still(config: Path) -> None:
    """Change the settings of a run so that a step changes no weight, no moment and no random state."""
    settings = {"lr": 0.0, "clip": TINY, "betas": [KEPT, KEPT], "momentum": KEPT, "weight_decay": 0.0, "max_steps": 5}
    settings |= dict.fromkeys(("dropout", "dropatt", "dropout_words", "weight_drop"), 0.0)
    lines = config.read_text("utf-8").splitlines()
    kept = [line for line in lines if not line.startswith(("dropout_input", "dropout_output"))]
    text = "\n".join(kept) + "\n"
    for setting, value in settings.items():
        text, count = re.subn(rf"(?m)^{setting} = .*$", f"{setting} = {value}", text)
        assert count == 1, f"{config} must have the setting {setting}"
    config.write_text(text, "utf-8")


@pytest.mark.parametrize("name", ["xl", "original", "muon", "ptb"])
def test_a_resumed_run_has_the_state_that_was_stored(name: str):
    run, owners = f"trained/{name}-still", EXPECTED["runs"][name]["owners"]
    shutil.copytree(f"trained/{name}", run)
    keep_still(Path(run, "config.toml"))
    txl("train", f"{run}/config.toml", "--out", run, "--resume")
    old, new = (
        load_file(Path(checkpoint(f"{name}-still", step), "training.safetensors")) for step in (SAVED, SAVED + 1)
    )
    average = any(key.startswith("live.") for key in old)
    models = [load_file(Path(checkpoint(f"{name}-still", step), "model.safetensors")) for step in (SAVED, SAVED + 1)]
    counted: dict[str, int] = {}
    for key, value in old.items():
        part, rest = key.split(".", 1)
        counted[part] = counted.get(part, 0) + 1
        if part == "optimizer":
            numbered, moment = key.rsplit(".", 1)
            found = new[key] if key in new else under_its_name(new, owners[numbered], "optimizer.", f".{moment}")
            if moment == "step":
                assert found == value + 1, key
            else:
                assert ((found == value) | ((value.abs() < TINY) & (found.abs() < TINY))).all(), key
        elif part == "live":
            identical(under_its_name(new, rest, "live."), value, key)
        elif part == "random":
            identical(new[key], value, key)
        elif value.ndim == 3 and value.shape[1] > 8:  # the last 4 positions of 12
            identical(new[key][:, :-8], value[:, 8:], key)
    assert counted["optimizer"] >= len(owners) and counted["random"] == 1 and counted["memory"] >= 2
    for weight, value in models[0].items():
        if average:  # of the weights after steps 3 and 4, and now of those after step 5, which are those after step 4
            value = value + (under_its_name(old, weight, "live.") - value) / 3
            torch.testing.assert_close(under_its_name(models[1], weight), value)
        else:
            identical(under_its_name(models[1], weight), value, weight)


def test_conversions_give_the_same_weights_and_numbers():
    same(imported(), EXPECTED["imported"])
    for program, name in (("huggingface", "xl"), ("original", "original")):
        found = load_model(f"from_{program}").model.state_dict()
        for weight, value in load_model(checkpoint(name)).model.state_dict().items():
            identical(found[weight], value, weight)


def test_the_original_format_is_written_as_it_was():
    txl("convert", checkpoint("original"), "--to-format", "original", "--to", "again")
    assert {path.name for path in Path("again").iterdir()} == {path.name for path in Path("original").iterdir()}
    for name in ("args.json", "vocab.txt", "transformer_xl_vocab.json"):
        assert Path("again", name).read_bytes() == Path("original", name).read_bytes(), name
    again, stored = (torch.load(Path(place, "state_dict.pt"), weights_only=True) for place in ("again", "original"))
    assert list(again) == list(stored)
    frequencies = "pos_emb.inv_freq"  # computed, not stored
    torch.testing.assert_close(again.pop(frequencies), stored.pop(frequencies))
    for name, value in stored.items():
        identical(again[name], value, name)


def test_an_exported_folder_gives_the_same_numbers():
    pytest.importorskip("transformers", minversion="5")
    old = exported()
    same(old, EXPECTED["exported"])
    txl("convert", checkpoint("xl"), "--to-format", "huggingface", "--to", "exported_now")
    assert exported("exported_now") == old, "what is exported now must give the same bits"


def test_the_exported_code_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch):
    transformers = pytest.importorskip("transformers", minversion="5")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(Path("modules").resolve()))
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = json.loads(Path("huggingface/config.json").read_text("utf-8"))["auto_map"]["AutoModelForCausalLM"]
    owner = transformers.dynamic_module_utils.get_class_from_dynamic_module(name, "huggingface")  # trust_remote_code's
    assert Path(sys.modules[owner.__module__].__file__ or "").is_relative_to(Path("modules").resolve())
    same(exported(owner=owner), EXPECTED["exported"])
