"""`txl convert` and `hf:NAME`: conversion from other programs, and an exact round trip."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from foreign import (
    AUTHORS,
    BANDS,
    LENGTHS,
    SHAPES,
    SLICES,
    WORDS,
    authors_module,
    classes,
    run_of,
    same,
    shuffled,
    to_theirs,
    vocabulary,
)
from small_models import VOCAB, small_model
from tiny_runs import refused

from transformer_xl import load_model as public_load_model
from transformer_xl.commands.main import main
from transformer_xl.config.settings import CorpusConfig, EvalConfig, Lengths, RunConfig, TrainConfig
from transformer_xl.data.vocab import Vocab
from transformer_xl.interop import reading
from transformer_xl.interop.reading import read_model
from transformer_xl.interop.source import Source
from transformer_xl.run.checkpoint import load_model
from transformer_xl.run.parts import EXPORTED_VOCAB

IDS = Vocab.of_ids(VOCAB)


@pytest.mark.parametrize(
    ("shape", "vocab"), [*((shape, WORDS) for shape in SHAPES.values()), ({}, IDS)], ids=[*SHAPES, "ids"]
)
def test_converting_to_hugging_face_and_back_is_exact(tmp_path, shape, vocab, capsys):
    pytest.importorskip("transformers")
    model = shuffled(small_model(dtype=torch.float32, untie_r=True, final_norm=True, zero_memory=True, **shape))
    run_of(model, tmp_path / "run", vocab)
    (tmp_path / ".tmp-out-0123abcd").mkdir()  # a killed export left it
    assert main(["convert", str(tmp_path / "run"), "--to-format", "huggingface", "--to", str(tmp_path / "out")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}
    assert bool(list((tmp_path / "out").glob("tokenizer*"))) == (vocab is WORDS)
    back = ["convert", str(tmp_path / "out"), "--from", "huggingface", "--to", str(tmp_path / "back")]
    assert main(back) == 0, capsys.readouterr().err
    found, before = load_model(tmp_path / "back"), load_model(tmp_path / "run")
    assert same(found.model, model) and found.vocab == vocab and found.config == before.config


@pytest.mark.parametrize("stored", ["model*.safetensors", "pytorch_model*.bin"])
def test_a_name_on_the_hub_is_converted_once_per_version(tmp_path, monkeypatch, stored):
    hub = pytest.importorskip("huggingface_hub")
    from transformer_xl.hf import export_huggingface

    monkeypatch.setenv("TXL_HOME", str(tmp_path / "cache"))
    model = shuffled(small_model(dtype=torch.float32, **BANDS))
    snapshot = tmp_path / "snapshots" / "abc123"
    export_huggingface(load_model(run_of(model, tmp_path / "run")), snapshot)
    if stored == "pytorch_model*.bin":
        state = {f"model.{name}": value for name, value in model.state_dict().items()}
        torch.save(state, snapshot / "pytorch_model.bin")
        (snapshot / "model.safetensors").unlink()
    asked = []

    def download(name, revision, allow_patterns):
        asked.append((name, revision, allow_patterns[-1]))
        assert "config.json" in allow_patterns and "transformer_xl_vocab.json" in allow_patterns
        return str(snapshot)

    monkeypatch.setattr(hub, "snapshot_download", download)
    for name in ("hf:some/model@v1", "hf:some/model"):
        found = public_load_model(name)
        assert same(found.model, model) and found.vocab == WORDS
    assert asked[0] == ("some/model", "v1", "model*.safetensors") and asked[-1] == ("some/model", None, stored)
    assert [path.name for path in (tmp_path / "cache" / "hub" / "some--model").glob("[!.]*")] == ["abc123"]


def test_a_name_on_the_hub_without_a_vocabulary_is_converted_with_one(tmp_path, monkeypatch, capsys):
    hub = pytest.importorskip("huggingface_hub")
    from transformer_xl.hf import export_huggingface

    monkeypatch.setenv("TXL_HOME", str(tmp_path / "cache"))
    model = shuffled(small_model(dtype=torch.float32, **BANDS))
    export_huggingface(load_model(run_of(model, tmp_path / "run")), tmp_path / "abc")
    (tmp_path / "abc" / EXPORTED_VOCAB).unlink()
    (tmp_path / "words.txt").write_text("".join(f"{word}\n" for word in WORDS.symbols))
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(tmp_path / "abc"))
    sentence = refused("eval hf:some/model", capsys)
    assert "Run `txl convert hf:some/model --from huggingface --vocab FILE --to DIR`" in sentence
    line = ["convert", "hf:some/model", "--from", "huggingface", "--vocab", str(tmp_path / "words.txt")]
    assert main([*line, "--to", str(tmp_path / "made")]) == 0
    assert same(load_model(tmp_path / "made").model, model)


def test_an_unreachable_hub_is_reported_in_one_sentence(monkeypatch, capsys):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refused("eval 'hf:not a name'", capsys).startswith("hf:not a name could not be fetched: ")


def test_a_pickled_module_is_converted_and_evaluated(tmp_path, capsys):
    pytest.importorskip("transformers")
    model = shuffled(small_model(dtype=torch.float32, **BANDS))
    with classes(**AUTHORS, Corpus="data_utils", Vocab="vocabulary") as made:
        torch.save(authors_module(model, LENGTHS), tmp_path / "model.pt")
        corpus = made["Corpus"]()
        corpus.vocab = vocabulary(made["Vocab"], WORDS.symbols)
        torch.save(corpus, tmp_path / "elsewhere.pt")
    (tmp_path / "text.txt").write_text("w1 w2 w3\nw4 nonsense w5\n" * 40)
    source, wanted = str(tmp_path / "model.pt"), str(tmp_path / "ours")
    convert = ["convert", source, "--from", "original", "--to", wanted]
    assert "holds no vocabulary: give --vocab" in refused(convert, capsys)
    assert main([*convert, "--vocab", str(tmp_path / "elsewhere.pt"), "--eval.tgt-len", "2"]) == 0
    shown = capsys.readouterr().out
    assert "4,020 weights" in shown and "each used once" in shown
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["report"]
    through = [*convert[:-1], str(tmp_path / "theirs"), "--to-format", "huggingface"]
    assert main([*through, "--vocab", str(tmp_path / "elsewhere.pt")]) == 0
    assert same(read_model(tmp_path / "theirs", "huggingface").model, model)
    assert "must be a new folder" in refused([*convert, "--vocab", str(tmp_path / "elsewhere.pt")], capsys)
    assert main(["eval", wanted, "--data", str(tmp_path / "text.txt"), "--json", "--precision", "fp32"]) == 0
    figures = json.loads(capsys.readouterr().out)["results"][0]
    assert (figures["tgt_len"], figures["mem_len"], figures["attn_len"], figures["clamp_len"]) == (2, 6, 6, 3)
    for more in ([], ["--to-format", "huggingface", "--eval.tgt-len", "2"]):
        assert "--from" in refused(["convert", wanted, "--to", str(tmp_path / "x"), *more], capsys)


def test_unstated_settings_come_from_the_recipe_of_the_same_shape(tmp_path, monkeypatch, capsys):
    model = shuffled(small_model(dtype=torch.float32, **SLICES))
    state = to_theirs(dict(model.state_dict()), model.config)
    torch.save(state, tmp_path / "model.pt")
    recipe = RunConfig(
        model=replace(model.config, untie_r=True, dropout=0.2, init_std=0.02),
        corpus=CorpusConfig(name="ptb", unit="word"),
        train=TrainConfig(tgt_len=20, mem_len=20, lr=0.5),
        eval=EvalConfig(tgt_len=8, mem_len=40, attn_len=40, clamp_len=30, batch_size=4),
    )
    monkeypatch.setattr(reading.recipes, "packaged_recipes", lambda: {"made-up": Path("x")})
    monkeypatch.setattr(reading.recipes, "load_recipe", lambda name: recipe)
    found = read_model(tmp_path, "original", vocab=WORDS)
    assert same(found.model, model) and found.config.model.dropout == 0.2
    assert (found.config.corpus, found.config.train, found.config.eval) == (recipe.corpus, recipe.train, recipe.eval)
    assert any("recipe made-up" in line for line in found.report)

    (tmp_path / "args.json").write_text(json.dumps({"mem_len": 9, "same_length": True}))
    found = read_model(tmp_path, "original", vocab=WORDS).config  # it states the lengths of training
    assert found.train.lengths == Lengths(tgt_len=20, mem_len=9, attn_len=9)
    assert found.eval_lengths == recipe.eval_lengths and found.eval.batch_size == 4

    tensorflow = partial(Source, tmp_path, zero_memory=True, clusters_reversed=False, same_length=1)
    source = tensorflow(arrays=dict(state))
    wider = reading.run_settings(source)  # TensorFlow's same_length sees one key more
    assert wider.eval_lengths == replace(recipe.eval_lengths, attn_len=41)
    source.add_settings({"mem_len": 50, "same_length": True})
    stated = reading.run_settings(source)  # it states the lengths of evaluation
    assert stated.eval_lengths == replace(recipe.eval_lengths, mem_len=50, attn_len=51)
    assert stated.train.lengths == recipe.train.lengths
    source = tensorflow(arrays=dict(state))
    source.add_settings({"mem_len": 50})
    assert reading.run_settings(source).eval_lengths == stated.eval_lengths  # the recipe's window is same_length

    source = Source(tmp_path, arrays=dict(state))
    source.add_settings({"tgt_len": 20, "mem_len": 20, "clamp_len": -1, "same_length": False})
    assert reading.run_settings(source).eval_lengths == Lengths(tgt_len=20, mem_len=20)  # not the recipe's


def test_lengths_changed_after_an_export_are_used_and_damage_is_refused(tmp_path):
    pytest.importorskip("transformers")
    run_of(shuffled(small_model(dtype=torch.float32)), tmp_path / "run")
    assert main(["convert", str(tmp_path / "run"), "--to-format", "huggingface", "--to", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"mem_len": 7, "attn_len": None}))
    found = read_model(tmp_path / "out", "huggingface")
    assert found.config.eval_lengths == Lengths(tgt_len=4, mem_len=7)
    marked = b"\xef\xbb\xbf" + json.dumps(config).encode()  # as Windows writes it
    (tmp_path / "out" / "config.json").write_bytes(marked)
    assert read_model(tmp_path / "out", "huggingface").config.model == found.config.model
    for broken in ({"run": None}, {"run": {"train": 3}}, {"mem_len": "x"}):
        (tmp_path / "out" / "config.json").write_text(json.dumps(config | broken))
        with pytest.raises(ValueError, match=r"config\.json"):
            read_model(tmp_path / "out", "huggingface")
    (tmp_path / "out" / "config.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        read_model(tmp_path / "out", "huggingface")
