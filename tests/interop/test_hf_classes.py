"""The exported model's vectors, and a class or a number for a text of any length."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
from safetensors.torch import load_file, save_file  # noqa: E402
from small_models import VOCAB, small_model, text  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from transformers import AutoModel, AutoModelForSequenceClassification  # noqa: E402

from transformer_xl.config.settings import EvalConfig, RunConfig, TrainConfig  # noqa: E402
from transformer_xl.data.vocab import Vocab  # noqa: E402
from transformer_xl.hf import (  # noqa: E402
    TransformerXLForSequenceClassification,
    TransformerXLModel,
    export_huggingface,
    read_classifier,
)
from transformer_xl.interop.reading import read_model  # noqa: E402
from transformer_xl.run.checkpoint import LoadedModel  # noqa: E402

transformers.utils.logging.disable_progress_bar()
TGT_LEN = 5
GOLDEN = Path(__file__).parents[1] / "golden" / "huggingface"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = small_model(dtype=torch.float32, dropout=0.0)
    run = RunConfig(model=model.config, train=TrainConfig(tgt_len=TGT_LEN, mem_len=7), eval=EvalConfig())
    path = tmp_path_factory.mktemp("classes") / "exported"
    export_huggingface(LoadedModel(model, Vocab.of_ids(VOCAB), run), path)
    return path


def classifier(folder: Path, **settings: Any) -> TransformerXLForSequenceClassification:
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(folder, **{"num_labels": 3} | settings).double()


def gradients(model: TransformerXLForSequenceClassification, ids: torch.Tensor, **more: Any) -> list[torch.Tensor]:
    model.zero_grad()
    model(ids, labels=torch.tensor([2, 0]), **more).loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_the_vectors_are_those_of_the_backbone_after_the_memory(folder):
    model = AutoModel.from_pretrained(folder)
    assert type(model) is TransformerXLModel
    ids = text(2, 13)
    first = model(ids[:, :3])
    rest = model(ids[:, 3:], past_key_values=first.past_key_values, output_hidden_states=True)
    memory, expected = None, []
    for piece in ids.split([3, 5, 5], dim=1):
        outputs, _, memory = model.model.read(piece, memory, model.config.lengths)
        expected.append(outputs)
    layers = [torch.cat(parts, 1) for parts in zip(*expected, strict=True)]
    assert torch.equal(torch.cat([first.last_hidden_state, rest.last_hidden_state], 1), layers[-1])
    assert all(torch.equal(a, b[:, 3:]) for a, b in zip(rest.hidden_states, layers, strict=True))
    assert rest.past_key_values.get_seq_length() == 13


def test_a_class_is_computed_from_the_mean_of_the_outputs(folder):
    model, ids = classifier(folder).eval(), text(2, 13)
    vectors = AutoModel.from_pretrained(folder).double()(ids).last_hidden_state
    torch.testing.assert_close(model(ids).logits, model.score(vectors.mean(1)))
    assert 0 < model.score.weight.abs().max() < 3, "only this layer is drawn"
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids], 1)
    mask = torch.tensor([[0] * 4 + [1] * 13] * 2)
    alone = [model(row[None, 3:]).logits for row in padded]
    mask[:, 3] = 1
    torch.testing.assert_close(model(padded, attention_mask=mask).logits, torch.cat(alone))


def test_the_gradient_of_drawn_segments_is_that_of_all_on_average(folder, monkeypatch):
    model, ids = classifier(folder, gradient_segments=None).train(), text(2, 13)
    exact = gradients(model, ids)
    for number in (1, 2):
        model.config.gradient_segments = number
        found = []
        for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
            monkeypatch.setattr(torch, "randperm", lambda count, order=order: torch.tensor(order))
            found.append(gradients(model, ids))
        mean = [torch.stack(each).mean(0) for each in zip(*found, strict=True)]
        for name, a, b in zip(dict(model.named_parameters()), mean, exact, strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
        assert any(not torch.allclose(a, b) for a, b in zip(found[0], exact, strict=True))


def test_what_training_keeps_does_not_grow_with_the_text(folder, monkeypatch):
    model = classifier(folder).train()
    monkeypatch.setattr(torch, "randperm", lambda count: torch.tensor([count - 1]))

    def kept(length: int) -> int:
        sizes = []
        with saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            model(text(2, length), labels=torch.tensor([2, 0]))
        return sum(sizes)

    assert kept(200) == kept(60)
    model.config.gradient_segments = None
    assert kept(200) > 3 * kept(60)


@pytest.mark.parametrize("case", ["div1-zeros", "div4-zeros", "plain-empty"])
def test_transfo_xls_models_without_a_softmax_give_the_same_vectors(case, tmp_path):
    """Also without the prefix of their names; a classifier's weight becomes ours."""
    whole = read_model(GOLDEN / case, "huggingface").model
    arrays = load_file(GOLDEN / case / "model.safetensors")
    kept = {name.removeprefix("transformer."): value for name, value in arrays.items() if not name.startswith("crit.")}
    for name, prefix, more in (
        ("headless", "", {}),
        ("classes", "transformer.", {"score.weight": torch.randn(3, whole.config.d_model)}),
    ):
        (tmp_path / name).mkdir()
        shutil.copy(GOLDEN / case / "config.json", tmp_path / name)
        save_file({prefix + key: value for key, value in kept.items()} | more, tmp_path / name / "model.safetensors")
    found = read_model(tmp_path / "headless", "huggingface")
    ids, lengths = text(2, 9, vocab=whole.config.vocab_size), found.config.eval_lengths
    assert torch.equal(found.model.hidden(ids, None, lengths)[0], whole.hidden(ids, None, lengths)[0])
    assert any("has no softmax" in note for note in found.report)
    model = read_classifier(tmp_path / "classes")
    assert type(model) is TransformerXLForSequenceClassification and model.config.num_labels == 3
    vectors = TransformerXLModel(model.config).eval()
    vectors.model = model.model
    score = load_file(tmp_path / "classes" / "model.safetensors")["score.weight"]
    expected = vectors(ids).last_hidden_state[:, -1] @ score.T
    torch.testing.assert_close(model(ids).logits, expected)
    model.save_pretrained(tmp_path / "ours")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(again(ids).logits, expected)
    with pytest.raises(ValueError, match=r"must have a classifier's score.weight, \[classes, \d+\]"):
        read_classifier(tmp_path / "headless")
    with pytest.raises(ValueError, match="is of this package"):
        read_classifier(tmp_path / "ours")
    assert read_model(tmp_path / "ours", "huggingface").model.config == model.config.shape
    config = json.loads((tmp_path / "headless" / "config.json").read_text()) | {"cutoffs": ["a"]}
    (tmp_path / "headless" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="cutoffs"):
        read_model(tmp_path / "headless", "huggingface")


@pytest.mark.parametrize("wrong", [{"pooling": "max"}, {"gradient_segments": 0}, {"gradient_segments": "2"}])
def test_wrong_settings_are_refused(folder, wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        classifier(folder, **wrong)


def test_options_of_the_other_classes_are_known(folder):
    model, ids = classifier(folder), torch.zeros(1, 3, dtype=torch.long)
    torch.testing.assert_close(model(ids, use_cache=False, inputs_embeds=None).logits, model(ids).logits)
    with pytest.raises(ValueError, match="output_hidden_states must be False or left out"):
        model(ids, output_hidden_states=True)


def test_a_number_has_the_squared_error_and_several_labels_have_theirs(folder):
    ids, one = text(2, 6), classifier(folder, num_labels=1)
    found = one(ids, labels=torch.tensor([1.5, -2.0], dtype=torch.float64))
    torch.testing.assert_close(found.loss, ((found.logits[:, 0] - torch.tensor([1.5, -2.0])) ** 2).mean())
    several = classifier(folder, problem_type="multi_label_classification")
    wanted = torch.tensor([[1.0, 0, 1], [0, 1, 1]], dtype=torch.float64)
    found = several(ids, labels=wanted)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(found.logits, wanted)
    torch.testing.assert_close(found.loss, expected)
