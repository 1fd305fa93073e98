"""Models of Hugging Face's transformers 4.37.2, converted: the same losses, memories and gradients (golden files)."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from transformer_xl.interop.mapping import entries
from transformer_xl.interop.reading import read_model
from transformer_xl.model.memory import Memory
from transformer_xl.train.objective import Objective

GOLDEN = Path(__file__).parents[1] / "golden" / "huggingface"
CASES = sorted(path.name for path in GOLDEN.iterdir())
WHOLE, TIED = "div1-partial", "div2-empty"
"""A case without ties, and one of three bands whose tables are tied, and all projections except the first."""

BAR = {torch.float64: 1e-12, torch.float32: 2e-6}
"""A few last digits of float32, because losses are below 10. Gradients are relative to the largest of their array."""


def edited(case: str, folder: Path, *, config: dict[str, Any] | None = None, weights: Any = None) -> Path:
    """A copy of a case with other settings, or with weights that `weights` changed in place."""
    shutil.copytree(GOLDEN / case, folder, dirs_exist_ok=True)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | (config or {})))
    if weights is not None:
        state = load_file(folder / "model.safetensors")
        weights(state)
        save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_losses_memories_and_gradients_equal_theirs(case):
    expected = load_file(GOLDEN / case / "expected.safetensors")
    imported = read_model(GOLDEN / case, "huggingface")
    model, lengths, memory = imported.model, imported.config.eval_lengths, None
    bar = {"rtol": 0, "atol": BAR[expected["nll"].dtype]}
    if "memory.0.0" in expected:
        model.backbone.config = replace(model.config, zero_memory=False)
        memory = Memory(
            tuple(expected[f"memory.0.{layer}"].transpose(0, 1) for layer in range(len(model.backbone.layers)))
        )
    loss = torch.zeros((), dtype=expected["nll"].dtype)
    for number, (ids, targets) in enumerate(zip(expected["ids"], expected["targets"], strict=True)):
        mean, nll, memory = Objective(model)(ids, targets, memory, lengths)
        loss = loss + mean
        torch.testing.assert_close(nll, expected["nll"][number], **bar)
        for layer, states in enumerate(memory.layers):
            torch.testing.assert_close(states.transpose(0, 1), expected[f"memory.{number + 1}.{layer}"], **bar)
    loss.backward()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    theirs = {
        key.removeprefix("gradient.").removeprefix("transformer."): gradient
        for key, gradient in expected.items()
        if key.startswith("gradient.")
    }
    entry_of = {entry.theirs: entry for entry in entries(model.config, theirs)}
    for name, gradient in theirs.items():
        actual = parameters[entry_of[name].ours].grad[entry_of[name].rows or slice(None)].reshape(gradient.shape)
        torch.testing.assert_close(actual, gradient, rtol=0, atol=max(gradient.abs().max().item(), 1) * bar["atol"])
    assert {parameters[entry_of[name].ours] for name in theirs} == set(model.parameters())
    assert sum(g.numel() for g in theirs.values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("case", CASES)
def test_the_report_accounts_for_every_array(case):
    pickled = GOLDEN / case / "pytorch_model.bin"
    state = torch.load(pickled) if pickled.exists() else load_file(GOLDEN / case / "model.safetensors")
    report = read_model(GOLDEN / case, "huggingface").report
    assert report[0].startswith(f"{len(state) - 1} arrays ") and report[0].endswith("each used once.")
    assert any("computed" in line and "transformer.pos_emb.inv_freq" in line for line in report)


def test_words_come_from_the_pickled_tokenizer():
    vocab = read_model(GOLDEN / "div2-empty", "huggingface").vocab
    assert vocab is not None and (vocab.unit, vocab.newlines) == ("word", "keep")
    assert vocab.symbols[:7] == ("<eos>", "<unk>", "the", ",", "naïve", "日本", "@-@")
    assert vocab.symbols[7:] == tuple(f"word{i}" for i in range(7, 29))
    assert read_model(GOLDEN / "plain-empty", "huggingface").vocab is None


def test_tied_arrays_may_be_absent_or_present(tmp_path):
    def add_tied(state: dict[str, Tensor]) -> None:
        assert "crit.out_layers.0.weight" not in state and "crit.out_projs.1" not in state
        for band in range(3):
            state[f"crit.out_layers.{band}.weight"] = state[f"transformer.word_emb.emb_layers.{band}.weight"].clone()
        for band in (1, 2):
            state[f"crit.out_projs.{band}"] = state[f"transformer.word_emb.emb_projs.{band}"].clone()

    alone = read_model(GOLDEN / TIED, "huggingface")
    both = read_model(edited(TIED, tmp_path, weights=add_tied), "huggingface")
    assert both.config == alone.config
    torch.testing.assert_close(both.model.state_dict(), alone.model.state_dict(), rtol=0, atol=0)


def test_folders_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"transfo-xl.*'gpt2'"):
        read_model(edited(WHOLE, tmp_path, config={"model_type": "gpt2"}), "huggingface")
    with pytest.raises(ValueError, match="SRC must be the folder of the model"):
        read_model(edited(WHOLE, tmp_path) / "config.json", "huggingface")
    for setting in ("unit=byte", "newlines=drop"):
        with pytest.raises(ValueError, match=r"corpus\.unit and corpus\.newlines must be those of the vocabulary"):
            read_model(GOLDEN / TIED, "huggingface", [f"--corpus.{setting}"])
    of_nothing = edited(WHOLE, tmp_path, config={"same_length": True, "mem_len": 0})
    assert read_model(of_nothing, "huggingface").config.eval_lengths.attn_len is None
    for name in ("model.safetensors", "config.json"):
        (edited(WHOLE, tmp_path) / name).unlink()
        with pytest.raises(FileNotFoundError, match=re.escape(name)):
            read_model(tmp_path, "huggingface")
