"""Models of the authors' TensorFlow code, converted: the same losses, memories and gradients.

`golden/README.md` says how the golden files were made.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign import same
from torch import Tensor

from transformer_xl.commands.main import main
from transformer_xl.interop.bundle import read_bundle
from transformer_xl.interop.mapping import entries
from transformer_xl.interop.reading import read_model
from transformer_xl.interop.tensorflow import _canonical
from transformer_xl.run.checkpoint import load_model
from transformer_xl.train.objective import Objective

GOLDEN = Path(__file__).parents[1] / "golden" / "tensorflow"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
each_case = pytest.mark.parametrize("case", CASES)

BAR = {torch.float64: {"rtol": 0, "atol": 1e-12}, torch.float32: {"rtol": 1e-6, "atol": 2e-6}}
"""A few last digits of losses below 20, memories below 10, and gradients of the mean loss, which are smaller."""


@each_case
def test_losses_memories_and_gradients_equal_theirs(case):
    expected = {name: torch.from_numpy(array) for name, array in np.load(GOLDEN / case / "expected.npz").items()}
    imported = read_model(GOLDEN / case, "tensorflow")
    model, memory, dtype = imported.model, None, expected["nll"].dtype

    def compare(actual: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(actual, wanted, **BAR[dtype])

    for ids, targets, nll, mems in zip(*(expected[name] for name in ("ids", "targets", "nll", "mems")), strict=True):
        model.zero_grad()
        loss, losses, memory = Objective(model)(ids.T, targets.T, memory, imported.config.eval_lengths)
        compare(losses.T, nll)
        compare(torch.stack(memory.layers).transpose(1, 2), mems)
    loss.backward()
    parameters = dict(model.named_parameters())
    wanted = {name.removeprefix("gradient/"): array for name, array in expected.items() if name.startswith("gradient/")}
    originals = [_canonical(name) for name in wanted]
    entry_of = {entry.theirs: entry for entry in entries(model.config, dict(originals))}
    for (original, transposed), gradient in zip(originals, wanted.values(), strict=True):
        entry = entry_of[original]
        rows = parameters[entry.ours].grad[entry.rows or slice(None)]
        compare((rows.T if transposed else rows).reshape(gradient.shape), gradient)
    found = {entry_of[original].ours for original, _ in originals}
    for name in parameters.keys() - found:  # bands as wide as the model have no projection there
        assert ".projections." in name and torch.equal(parameters[name], torch.eye(len(parameters[name]), dtype=dtype))
    assert sum(g.numel() for g in wanted.values()) == sum(parameters[name].numel() for name in found)


@each_case
def test_settings_equal_theirs(case):
    stated = json.loads((GOLDEN / case / "hparams.json").read_text())
    corpus = json.loads((GOLDEN / case / "corpus-info.json").read_text())
    config = read_model(GOLDEN / case, "tensorflow").config
    same = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "div_val", "untie_r", "dropout", "dropatt")
    assert {name: getattr(config.model, name) for name in same} == {name: stated[name] for name in same}
    assert config.model.embed_width == stated["d_embed"] and config.model.vocab_size == corpus["vocab_size"]
    assert list(config.model.cutoffs) == [edge for edge in corpus["cutoffs"] if 0 < edge < corpus["vocab_size"]]
    lengths = config.eval_lengths
    assert (lengths.tgt_len, lengths.mem_len) == (stated["tgt_len"], stated["mem_len"])
    assert lengths.clamp_len == (stated["clamp_len"] if stated["clamp_len"] > 0 else None)
    assert lengths.attn_len == (stated["mem_len"] + 1 if stated["same_length"] else None)


@each_case
def test_every_variable_is_used_or_named(case):
    variables = read_bundle(GOLDEN / case / "model.ckpt-7")
    used = {name.removeprefix("gradient/") for name in np.load(GOLDEN / case / "expected.npz") if "/" in name}
    report = read_model(GOLDEN / case, "tensorflow").report
    numbers = sum(variables[name].numel() for name in used)
    assert report[0] == f"{len(used)} arrays ({numbers:,} numbers), each used once."
    (left_out,) = (line for line in report if line.startswith("Left out"))
    assert set(re.findall(r"[\w/]+/Adam(?:_1)?|beta._power|global_step", left_out)) == variables.keys() - used
    assert "training" in left_out


def test_the_vocabulary_comes_with_the_corpus():
    vocab = read_model(GOLDEN / "wt103", "tensorflow").vocab
    assert vocab is not None and (vocab.unit, vocab.newlines) == ("word", "keep")
    assert vocab.symbols == ("<eos>", *(f"word{i}" for i in range(1, 40)), "naïve")
    assert read_model(GOLDEN / "lm1b", "tensorflow").vocab is None


def test_a_folder_like_the_released_ones_is_converted(tmp_path):
    """`model/` and `data/` as the authors' download.sh makes them."""
    for name, pattern in {"model": "*ckpt*", "data": "c[ao][cr]*"}.items():
        (tmp_path / name).mkdir()
        for file in (GOLDEN / "wt103").glob(pattern):
            shutil.copy(file, tmp_path / name)
    shutil.copy(GOLDEN / "wt103" / "checkpoint", tmp_path / "model")
    assert main(["convert", str(tmp_path), "--from", "tensorflow", "--to", str(tmp_path / "wt103")]) == 0
    found, whole = load_model(tmp_path / "wt103"), read_model(GOLDEN / "wt103", "tensorflow")
    assert same(found.model, whole.model.float()) and found.vocab == whole.vocab
