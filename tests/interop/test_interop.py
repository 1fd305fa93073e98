"""Other programs' checkpoints: every array becomes the right weight, and statements are checked against arrays."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from dataclasses import replace
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
    bands_state,
    classes,
    nvidia_checkpoint,
    same,
    shuffled,
    to_theirs,
    vocabulary,
)
from safetensors.torch import load_file, save_file
from small_models import VOCAB, small_model

from transformer_xl.config.settings import Lengths
from transformer_xl.data.vocab import Vocab
from transformer_xl.interop.reading import read_model
from transformer_xl.interop.vocabulary import read_vocabulary


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code:UserWarning")
@pytest.mark.parametrize("form", ["zip", "legacy", "DataParallel"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_authors_module_is_read(tmp_path, shape, form):
    model = shuffled(small_model(dropout=0.1, dropatt=0.2, pre_lnorm=True, **shape))
    with classes(**AUTHORS):
        module = authors_module(model, LENGTHS)
        module = torch.nn.DataParallel(module) if form == "DataParallel" else module
        torch.save(module, tmp_path / "model.pt", _use_new_zipfile_serialization=form != "legacy")
    found = read_model(tmp_path, "original")
    assert same(found.model, model) and found.vocab is None
    mine = found.config.model
    assert (mine.dropout, mine.dropatt, mine.pre_lnorm, mine.zero_memory) == (0.1, 0.2, True, False)
    assert found.config.eval_lengths == LENGTHS
    assert any("pos_emb.inv_freq" in line for line in found.report)


def test_clusters_of_the_original_are_counted_from_the_end():
    """Their log p of band i is the head's column -i: their formula on their arrays gives our log-probabilities."""
    model = shuffled(small_model(**BANDS))
    theirs = to_theirs(dict(model.state_dict()), model.config)
    hidden = torch.randn(4, 14, dtype=torch.float64)
    weight = torch.cat([theirs["crit.out_layers.0.weight"], theirs["crit.cluster_weight"]])
    bias = torch.cat([theirs["crit.out_layers.0.bias"], theirs["crit.cluster_bias"]])
    head = (hidden @ theirs["crit.out_projs.0"] @ weight.T + bias).log_softmax(-1)
    log_probs = [head[:, :5]]
    for i in (1, 2):
        part = hidden @ theirs[f"crit.out_projs.{i}"] @ theirs[f"crit.out_layers.{i}.weight"].T
        log_probs.append(head[:, -i, None] + (part + theirs[f"crit.out_layers.{i}.bias"]).log_softmax(-1))
    torch.testing.assert_close(model.softmax.log_probs(hidden), torch.cat(log_probs, -1), rtol=0, atol=1e-12)


def test_nvidias_dict_is_read(tmp_path):
    model = shuffled(small_model(dtype=torch.float32, dropout=0.1, **BANDS))
    content = nvidia_checkpoint(model, replace(LENGTHS, attn_len=7, clamp_len=None))
    with classes(Vocab="utils.vocabulary") as made:
        content["vocab"] = vocabulary(made["Vocab"], WORDS.symbols)
        torch.save(content, tmp_path / "checkpoint_best.pt")
    found = read_model(tmp_path / "checkpoint_best.pt", "nvidia")
    assert same(found.model, model) and found.vocab == WORDS
    assert found.config.eval_lengths == Lengths(tgt_len=4, mem_len=6, attn_len=7)  # its same_length sees one key more
    assert found.config.model.dropout == 0.1 and found.config.corpus.unit == "word"
    assert any("optimizer_state" in line and "train_step" in line for line in found.report)


@pytest.mark.parametrize("key", [None, "model_state_dict"])
def test_a_state_dict_is_read_with_the_settings_beside_it(tmp_path, key):
    model = shuffled(small_model(dtype=torch.float32, **SLICES))
    state = {f"module.{n}": v for n, v in to_theirs(dict(model.state_dict()), model.config).items()}
    torch.save({key: state} if key else state, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"does not say where the bands .* end: give --model\.cutoffs"):
        read_model(tmp_path, "original")
    assert same(read_model(tmp_path, "original", ["--model.cutoffs", "5,11"]).model, model)
    beside = {"cutoffs": [0, 5, 11, VOCAB], "mem_len": 9, "tgt_len": 5, "clamp_len": -1, "same_length": False}
    (tmp_path / "args.json").write_text(json.dumps(beside | {"n_layer": 3, "attn_type": 0, "unheard_of": "x"}))
    found = read_model(tmp_path / "model.pt", "original")
    assert same(found.model, model) and found.config.eval_lengths == Lengths(tgt_len=5, mem_len=9)
    changed = read_model(tmp_path, "original", ["--eval.mem-len", "99", "--model.dropout", "0.3"]).config
    assert changed.eval_lengths.mem_len == 99 and changed.model.dropout == 0.3


def arrays(complaint: str, **changed: object) -> tuple[dict, dict, list[str], str]:
    """Arrays of these names changed, or absent if None; __ is a dot."""
    return {name.replace("__", "."): value for name, value in changed.items()}, {}, [], re.escape(complaint)


def stated(complaint: str, **settings: object) -> tuple[dict, dict, list[str], str]:
    """Settings in a JSON file beside the arrays."""
    return {}, settings, [], complaint


def asked(complaint: str, *override: str) -> tuple[dict, dict, list[str], str]:
    """Settings of a command line."""
    return {}, {}, list(override), complaint


REFUSED = (
    arrays("must hold r_w_bias once, and has r_w_bias and module.r_w_bias", module__r_w_bias=torch.zeros(2, 5)),
    arrays("has 10 numbers of float8", r_w_bias=torch.ones(2, 5).to(torch.float8_e4m3fn)),
    arrays("must hold fractions, and r_w_bias has 10 numbers of int", r_w_bias=torch.ones(2, 5, dtype=torch.int64)),
    arrays("emb_layers.0.weight has 0 numbers of", word_emb__emb_layers__0__weight=torch.zeros(0, 2**40)),
    arrays("r_w_bias must be finite", r_w_bias=torch.full((2, 5), torch.nan)),
    arrays("has a 0-dimensional crit.cluster_weight", crit__cluster_weight=torch.tensor(1.0)),
    arrays("has a 5-dimensional r_w_bias", r_w_bias=torch.zeros(1, 2, 5, 1, 1)),
    arrays("layers.3.dec_attn.qkv_net.weight is missing", layers__100000000__x=torch.zeros(1)),
    arrays("must hold a module or its state dict", r_w_bias=3),
    arrays("lacks word_emb.emb_layers.2.weight", word_emb__emb_layers__2__weight=None),
    arrays("crit.out_projs.0 is missing", crit__out_projs__0=None),
    arrays(
        "crit.cluster_bias must be 2 but is 3, layers.1.dec_attn.r_net.weight is missing, r_emb is unexpected",
        layers__1__dec_attn__r_net__weight=None,
        crit__cluster_bias=torch.zeros(3),
        r_emb=torch.zeros(2),  # attn_type 1
    ),
    stated(r": train\.mem_len must be at least 0, got -5", mem_len=-5),
    stated(r": model\.dropout must be at least 0 and below 1, got 7", dropout=7),
    stated("mem_len must be a whole number, and is ", mem_len=[["x"] * 9] * 9),
    stated("epsilon must be a number, .*; cutoffs must be a list", cutoffs=[5, None], layer_norm_epsilon=10**400),
    asked(r"final_norm\.weight of this package is nowhere in it", "--model.final-norm", "true"),
    asked(r"model\.layer_norm_epsilon must be above 0, got -1", "--model.layer-norm-epsilon", "-1"),
    asked(r"model\.cutoffs must be a list of whole numbers", "--model.cutoffs", "x"),
)


@pytest.mark.parametrize(("changed", "settings", "override", "complaint"), REFUSED)
def test_what_does_not_fit_is_refused(tmp_path, changed, settings, override, complaint):
    _, state = bands_state()
    torch.save({k: v for k, v in (state | changed).items() if v is not None}, tmp_path / "model.pt")
    (tmp_path / "args.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=complaint):
        read_model(tmp_path, "original", override, vocab=WORDS)


def test_other_entries_of_a_checkpoint_are_named(tmp_path):
    model, state = bands_state()
    torch.save({"state_dict": state, "optimizer": {"step": 3}, "args": {"mem_len": 44}}, tmp_path / "model.pt")
    for file, mem_len in (("a.json", 9), ("b.json", 30)):
        (tmp_path / file).write_text(json.dumps({"mem_len": mem_len}))
    found = read_model(tmp_path, "original")
    assert same(found.model, model) and found.config.train.mem_len == 30
    report = "\n".join(found.report)
    assert "optimizer, args" in report
    assert "Nothing states tgt_len, clamp_len, same_length, pre_lnorm" in report
    with classes(Corpus="data_utils") as made:
        corpus = made["Corpus"]()
        corpus.dataset = "x"
        torch.save(corpus, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"must hold a module or its state dict, and holds data_utils\.Corpus"):
        read_model(tmp_path, "original")


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ({"tgt_len": 5, "clamp_len": 9}, Lengths(tgt_len=5, mem_len=128, clamp_len=9)),
        ({"mem_len": 3, "clamp_len": 0, "same_length": None}, Lengths(tgt_len=128, mem_len=3)),
        ({"mem_len": 3, "same_length": True}, Lengths(tgt_len=128, mem_len=3, attn_len=3)),
    ],
)
def test_each_stated_length_is_used(tmp_path, lengths, wanted):
    _, state = bands_state()
    torch.save(state, tmp_path / "model.pt")
    (tmp_path / "args.json").write_text(json.dumps(lengths))
    assert read_model(tmp_path, "original").config.eval_lengths == wanted


@pytest.mark.parametrize(
    ("symbols", "wanted"),
    [
        (["<eos>", "the", "<unk>"], Vocab("word", ("<eos>", "the", "<unk>"))),
        (["<S>", "the", "<UNK>"], Vocab("word", ("<S>", "the", "<UNK>"), "sentence")),
        (["101", "32", "255"], Vocab("byte", (101, 32, 255), "drop")),
        (["101", "10"], Vocab("byte", (101, 10))),
        (["_", "e", "t"], Vocab("char", (" ", "e", "t"), "drop")),
    ],
)
def test_vocabularies_of_the_authors_are_read(tmp_path, symbols, wanted):
    with classes(Corpus="data_utils", Vocab="vocabulary") as made:
        corpus = made["Corpus"]()
        vars(corpus).update(vocab=vocabulary(made["Vocab"], symbols), train=torch.arange(5), dataset="x")
        torch.save(corpus, tmp_path / "cache.pt", _use_new_zipfile_serialization=False)
    assert read_vocabulary(tmp_path / "cache.pt") == wanted
    (tmp_path / "list").write_text("\n".join(symbols) + "\n")
    (tmp_path / "ours.json").write_text(json.dumps(wanted.to_json()))
    assert read_vocabulary(tmp_path / "list") == read_vocabulary(tmp_path / "ours.json") == wanted


def test_a_vocabulary_of_another_size_is_refused(tmp_path):
    model = shuffled(small_model(dtype=torch.float32))
    torch.save(to_theirs(dict(model.state_dict()), model.config), tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"must hold as many tokens as there are weights for, 23, and .* has 2\."):
        read_model(tmp_path, "original", vocab=Vocab("word", ("<eos>", "<unk>")))


def test_a_vocabulary_is_found_inside_of_a_checkpoint(tmp_path):
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({"corpus": {"vocab": {"idx2sym": ["one", "two"]}}}))
    assert read_vocabulary(tmp_path / "vocab.pkl").symbols == ("one", "two")
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({"else": {"idx2sym": ["one", "two"]}}))
    with pytest.raises(ValueError, match="must hold a vocabulary"):
        read_vocabulary(tmp_path / "vocab.pkl")


@pytest.mark.parametrize("symbols", [["a", "a"], ["a", ""], ["a", "\ud800"], ["one two", "a"], ["a\nb", "c"]])
def test_impossible_vocabularies_are_refused(tmp_path, symbols):
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": symbols}))
    with pytest.raises(ValueError, match=r"vocab\.pkl must list"):
        read_vocabulary(tmp_path / "vocab.pkl")


def test_weights_in_several_files_are_read(tmp_path):
    home = Path(__file__).parents[1] / "golden" / "huggingface" / "div2-partial"
    shutil.copy(home / "config.json", tmp_path)
    first, *others = state = load_file(home / "model.safetensors")
    save_file({first: state[first].clone()}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: state[name].clone() for name in others}, tmp_path / "model-00002-of-00002.safetensors")
    assert same(read_model(tmp_path, "huggingface").model, read_model(home, "huggingface").model)
