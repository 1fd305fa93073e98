"""Other programs' checkpoints: every array lands in its place, statements are carried, and the way out leads back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from foreign import AUTHORS, authors_module, classes, nvidia_checkpoint, vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import VOCAB, small_model, text

from transformer_xl import load_model as public_load_model
from transformer_xl.checkpoint import load_model, save_checkpoint
from transformer_xl.cli import main
from transformer_xl.data.vocab import Vocab
from transformer_xl.interop import read_model
from transformer_xl.interop.mapping import entries, to_ours, to_theirs
from transformer_xl.interop.source import Source
from transformer_xl.model import TransformerXL
from transformer_xl.settings import CorpusConfig, EvalConfig, Lengths, RunConfig, TrainConfig, TransformerXLConfig

BANDS = {"cutoffs": (5, 11), "div_val": 2, "d_embed": 14, "tie_projs": (False, True, True)}
SLICES = {"cutoffs": (5, 11)}
SHAPES = {"plain": {}, "slices": SLICES, "slices, projected": {**SLICES, "d_embed": 6}, "bands": BANDS}
LENGTHS = Lengths(tgt_len=4, mem_len=6, clamp_len=3, attn_len=6)
WORDS = Vocab("word", ("<eos>", *(f"w{i}" for i in range(1, VOCAB - 1)), "<unk>"))


def shuffled(model: torch.nn.Module) -> torch.nn.Module:
    """Every weight drawn anew, those that start at 0 included."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def same(found: torch.nn.Module, model: torch.nn.Module) -> bool:
    states = found.state_dict(), model.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(states[0][n], states[1][n]) for n in states[1])


shapes = st.sampled_from(
    [
        {},
        {"tie_projs": (True,)},
        {"cutoffs": (4, 9)},
        {"cutoffs": (4, 9), "div_val": 2, "tie_projs": (False, True, False)},
        {"cutoffs": (4,), "div_val": 4, "tie_projs": (True, True)},
    ]
)
SIZES = {"vocab_size": 17, "n_layer": 2, "n_head": 2, "d_head": 3, "d_model": 8, "d_inner": 5}


@settings(deadline=None)
@given(shapes, st.sampled_from([None, 6]), st.booleans(), st.booleans(), st.booleans())
def test_the_table_leads_there_and_back(shape, d_embed, tie_weight, untie_r, reverse):
    config = TransformerXLConfig(**SIZES, **shape, d_embed=d_embed, tie_weight=tie_weight, untie_r=untie_r)
    torch.manual_seed(0)
    model = shuffled(TransformerXL(config).double())
    theirs = to_theirs(dict(model.state_dict()), config, reverse=reverse)
    assert len(theirs) == len(entries(config, reverse=reverse))
    source = Source(Path("x"), "original" if reverse else "huggingface", dict(theirs))
    state = to_ours(source, config)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code:UserWarning")
@pytest.mark.parametrize("old", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_authors_module(tmp_path, shape, old):
    model = shuffled(small_model(dropout=0.1, dropatt=0.2, pre_lnorm=True, **shape))
    with classes(**AUTHORS):
        module = authors_module(model, LENGTHS)
        torch.save(module, tmp_path / "model.pt", _use_new_zipfile_serialization=not old)
    found = read_model(tmp_path, "original")
    assert same(found.model(), model) and found.vocab is None
    mine = found.config.model
    assert (mine.dropout, mine.dropatt, mine.pre_lnorm, mine.zero_memory) == (0.1, 0.2, True, False)
    assert found.config.eval_lengths == LENGTHS
    assert any("pos_emb.inv_freq" in line for line in found.report)
    assert any("reverse" in line for line in found.report) == bool(shape)


def test_clusters_of_the_original_are_counted_from_the_end():
    """Its log p of band i is the head's column -i; here that is checked by its own formula on its own arrays."""
    model = shuffled(small_model(**BANDS))
    theirs = to_theirs(dict(model.state_dict()), model.config, reverse=True)
    hidden = torch.randn(4, 14, dtype=torch.float64)
    weight = torch.cat([theirs["crit.out_layers.0.weight"], theirs["crit.cluster_weight"]])
    bias = torch.cat([theirs["crit.out_layers.0.bias"], theirs["crit.cluster_bias"]])
    head = (hidden @ theirs["crit.out_projs.0"] @ weight.T + bias).log_softmax(-1)
    log_probs = [head[:, :5]]
    for i in (1, 2):
        part = hidden @ theirs[f"crit.out_projs.{i}"] @ theirs[f"crit.out_layers.{i}.weight"].T
        log_probs.append(head[:, -i, None] + (part + theirs[f"crit.out_layers.{i}.bias"]).log_softmax(-1))
    torch.testing.assert_close(model.softmax.log_probs(hidden), torch.cat(log_probs, -1), rtol=0, atol=1e-12)


def test_nvidias_dict(tmp_path):
    model = shuffled(small_model(dtype=torch.float32, dropout=0.1, **BANDS))
    content = nvidia_checkpoint(model, replace(LENGTHS, attn_len=7, clamp_len=None))
    with classes(Vocab="utils.vocabulary") as made:
        content["vocab"] = vocabulary(made["Vocab"], WORDS.symbols)
        torch.save(content, tmp_path / "checkpoint_best.pt")
    found = read_model(tmp_path / "checkpoint_best.pt", "nvidia")
    assert same(found.model(), model) and found.vocab == WORDS
    assert found.config.eval_lengths == Lengths(tgt_len=4, mem_len=6, attn_len=7)  # its same_length sees one key more
    assert found.config.model.dropout == 0.1 and found.config.corpus.unit == "word"
    assert any("optimizer_state" in line and "train_step" in line for line in found.report)


@pytest.mark.parametrize("key", [None, "model_state_dict"])
def test_a_state_dict_with_what_is_stated_beside_it(tmp_path, key):
    model = shuffled(small_model(dtype=torch.float32, **SLICES))
    state = {f"module.{n}": v for n, v in to_theirs(dict(model.state_dict()), model.config, reverse=True).items()}
    torch.save({key: state} if key else state, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"does not say where the bands .* end: give --model\.cutoffs"):
        read_model(tmp_path, "original")
    assert same(read_model(tmp_path, "original", ["--model.cutoffs", "5,11"]).model(), model)
    stated = {"cutoffs": [0, 5, 11, VOCAB], "mem_len": 9, "tgt_len": 5, "clamp_len": -1, "same_length": False}
    (tmp_path / "args.json").write_text(json.dumps(stated | {"n_layer": 3, "attn_type": 0, "unheard_of": "x"}))
    found = read_model(tmp_path / "model.pt", "original")
    assert same(found.model(), model) and found.config.eval_lengths == Lengths(tgt_len=5, mem_len=9)
    changed = read_model(tmp_path, "original", ["--eval.mem-len", "99", "--model.dropout", "0.3"]).config
    assert changed.eval_lengths.mem_len == 99 and changed.model.dropout == 0.3


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        ({"n_layer": 4}, "n_layer is 4 by its settings and 3 by its arrays"),
        ({"n_layer": 10**12}, "n_layer is 1000000000000 by its settings"),
        ({"cutoffs": [4, 11]}, r"cutoffs is \(4, 11\) by its settings and \(5, 11\) by its arrays"),
        ({"mem_len": "long"}, "mem_len must be int or NoneType, and is 'long'"),
        ({"cutoffs": [5, None]}, "cutoffs must be list or tuple"),
        ({"attn_type": 2}, "attn_type is 2, and only attn_type 0"),
        ({"n_head": 5, "d_head": 2}, "n_head is 5 .*; d_head is 2"),
    ],
)
def test_statements_that_contradict_the_arrays_are_refused_together(tmp_path, stated, complaint):
    model = shuffled(small_model(dtype=torch.float32, **BANDS))
    torch.save(to_theirs(dict(model.state_dict()), model.config, reverse=True), tmp_path / "model.pt")
    (tmp_path / "args.json").write_text(json.dumps(stated))
    with pytest.raises(ValueError, match=complaint):
        read_model(tmp_path, "original")


def test_every_array_that_does_not_fit_is_told_at_once(tmp_path):
    model = shuffled(small_model(dtype=torch.float32, **BANDS))
    state = to_theirs(dict(model.state_dict()), model.config, reverse=True)
    del state["layers.1.dec_attn.r_net.weight"]
    state["crit.cluster_bias"] = torch.zeros(3)
    state["layers.2.dec_attn.k_net.weight"] = torch.zeros(2)
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(ValueError) as told:
        read_model(tmp_path, "original")
    for part in (
        "layers.1.dec_attn.r_net.weight is missing",
        "crit.cluster_bias must be 2, and is 3",
        "layers.2.dec_attn.k_net.weight is unexpected",
    ):
        assert part in str(told.value)
    state = to_theirs(dict(model.state_dict()), model.config, reverse=True)
    torch.save(state | {"layers.0.dec_attn.q_net.weight": torch.zeros(2)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"q_net.* attn_type 2 or 3, and only attn_type 0"):
        read_model(tmp_path, "original")


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
def test_vocabularies_of_the_authors(tmp_path, symbols, wanted):
    with classes(Corpus="data_utils", Vocab="vocabulary") as made:
        corpus = made["Corpus"]()
        vars(corpus).update(vocab=vocabulary(made["Vocab"], symbols), train=torch.arange(5), dataset="x")
        torch.save(corpus, tmp_path / "cache.pt", _use_new_zipfile_serialization=False)
        from transformer_xl.interop import read_vocabulary

    assert read_vocabulary(tmp_path / "cache.pt") == (wanted, [])


def run_of(model, folder: Path, vocab: Vocab = WORDS) -> Path:
    train = TrainConfig(tgt_len=4, mem_len=6, attn_len=6)
    config = RunConfig(model=model.config, corpus=CorpusConfig(unit=vocab.unit), train=train, eval=EvalConfig())
    return save_checkpoint(folder, model=model, vocab=vocab, config=config)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_out_to_the_original_and_back_is_exact(tmp_path, shape, capsys):
    model = shuffled(small_model(dtype=torch.float32, **shape))
    run_of(model, tmp_path / "run")
    assert main(["convert", str(tmp_path / "run"), "--to-format", "original", "--to", str(tmp_path / "out")]) == 0
    state = torch.load(tmp_path / "out" / "state_dict.pt", weights_only=True)
    assert {name.split(".")[0] for name in state} == {"word_emb", "layers", "crit", "pos_emb", "r_w_bias", "r_r_bias"}
    assert state["r_w_bias"].shape == (2, 5) and state["pos_emb.inv_freq"].shape == (7,)
    back = ["convert", str(tmp_path / "out"), "--from", "original", "--to", str(tmp_path / "back")]
    assert main(back) == 0, capsys.readouterr().err
    found, before = load_model(tmp_path / "back"), load_model(tmp_path / "run")
    assert same(found.model, model) and found.vocab == WORDS
    unsaid = {name: getattr(model.config, name) for name in ("init_std", "proj_init_std", "d_embed")}
    assert replace(found.config.model, **unsaid) == before.config.model
    assert found.config.eval_lengths == before.config.eval_lengths
    assert main(["convert", str(tmp_path / "back"), "--to-format", "original", "--to", str(tmp_path / "again")]) == 0
    again = torch.load(tmp_path / "again" / "state_dict.pt", weights_only=True)
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_out_to_hugging_face_and_back_is_exact(tmp_path, shape, capsys):
    pytest.importorskip("transformers")
    model = shuffled(small_model(dtype=torch.float32, untie_r=True, final_norm=True, zero_memory=True, **shape))
    run_of(model, tmp_path / "run")
    assert main(["convert", str(tmp_path / "run"), "--to-format", "huggingface", "--to", str(tmp_path / "out")]) == 0
    back = ["convert", str(tmp_path / "out"), "--from", "huggingface", "--to", str(tmp_path / "back")]
    assert main(back) == 0, capsys.readouterr().err
    found, before = load_model(tmp_path / "back"), load_model(tmp_path / "run")
    assert same(found.model, model) and found.vocab == WORDS and found.config == before.config


def test_from_one_program_to_another(tmp_path):
    model = shuffled(small_model(dtype=torch.float32, **BANDS))
    content = nvidia_checkpoint(model, LENGTHS)
    torch.save(content, tmp_path / "nv.pt")
    (tmp_path / "words.txt").write_text("\n".join(WORDS.symbols))
    through = ["convert", str(tmp_path / "nv.pt"), "--from", "nvidia", "--to-format", "original"]
    assert main([*through, "--to", str(tmp_path / "out"), "--vocab", str(tmp_path / "words.txt")]) == 0
    assert same(read_model(tmp_path / "out", "original").model(), model)


@pytest.mark.parametrize("stored", ["safetensors", "bin"])
def test_a_name_on_the_hub_is_fetched_and_converted_once(tmp_path, monkeypatch, stored):
    hub = pytest.importorskip("huggingface_hub")
    from transformer_xl.hf import export_huggingface

    monkeypatch.setenv("TXL_HOME", str(tmp_path / "cache"))
    model = shuffled(small_model(dtype=torch.float32, **BANDS))
    snapshot = tmp_path / "snapshots" / "abc123"
    export_huggingface(load_model(run_of(model, tmp_path / "run")), snapshot)
    if stored == "bin":
        torch.save(
            {f"model.{name}": value for name, value in model.state_dict().items()}, snapshot / "pytorch_model.bin"
        )
        (snapshot / "model.safetensors").unlink()
    asked = []

    def download(name, allow_patterns):
        asked.append((name, sorted(allow_patterns)))
        return str(snapshot)

    monkeypatch.setattr(
        hub, "list_repo_files", lambda name: [*(path.name for path in snapshot.iterdir()), "tf_model.h5"]
    )
    monkeypatch.setattr(hub, "snapshot_download", download)
    for _ in range(2):
        found = public_load_model("hf:some/model")
        assert same(found.model, model) and found.vocab == WORDS
    weights = "model.safetensors" if stored == "safetensors" else "pytorch_model.bin"
    wanted = sorted(["config.json", "transformer_xl_vocab.json", weights])
    assert asked == [("some/model", wanted)] * 2
    assert [path.name for path in (tmp_path / "cache" / "hub").iterdir()] == ["some--model@abc123"]


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch, capsys):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["eval", "hf:not a name"]) == 2
    assert re.fullmatch(r"txl: hf:not a name could not be fetched: .*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"untie_r": True}, "untie_r must be false"),
        ({"final_norm": True, "layer_norm_epsilon": 1e-12}, "final_norm must be false; model.layer_norm_epsilon"),
        ({"embedding_scale": 1.0}, r"embedding_scale must be sqrt\(d_model\), and is 1.0"),
    ],
)
def test_what_the_original_has_not_is_refused(tmp_path, changes, complaint, capsys):
    run_of(small_model(dtype=torch.float32, **changes), tmp_path / "run")
    assert main(["convert", str(tmp_path / "run"), "--to-format", "original", "--to", str(tmp_path / "out")]) == 2
    assert re.search(complaint, capsys.readouterr().err) and not (tmp_path / "out").exists()


def test_the_whole_journey_from_a_pickled_module_to_a_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TXL_HOME", str(tmp_path / "cache"))
    model = shuffled(small_model(dtype=torch.float32, **BANDS))
    with classes(**AUTHORS, Corpus="data_utils", Vocab="vocabulary") as made:
        torch.save(authors_module(model, LENGTHS), tmp_path / "model.pt")
        corpus = made["Corpus"]()
        corpus.vocab = vocabulary(made["Vocab"], WORDS.symbols, lower_case=True)
        torch.save(corpus, tmp_path / "elsewhere.pt")
    (tmp_path / "text.txt").write_text("w1 w2 w3\nw4 nonsense w5\n" * 40)
    source, wanted = str(tmp_path / "model.pt"), str(tmp_path / "ours")
    convert = ["convert", source, "--from", "original", "--to", wanted]
    assert main(convert) == 2
    assert "holds no vocabulary: give --vocab" in capsys.readouterr().err
    assert main([*convert, "--vocab", str(tmp_path / "elsewhere.pt"), "--eval.tgt-len", "2"]) == 0
    shown = capsys.readouterr().out
    assert "3 layers" in shown and "each used once" in shown and "lowers text" in shown
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["report"]
    assert main([*convert, "--vocab", str(tmp_path / "elsewhere.pt")]) == 2
    assert "must be a new folder" in capsys.readouterr().err
    assert main(["eval", wanted, "--data", str(tmp_path / "text.txt"), "--json", "--precision", "fp32"]) == 0
    figures = json.loads(capsys.readouterr().out)["results"][0]
    assert (figures["tgt_len"], figures["mem_len"], figures["attn_len"], figures["clamp_len"]) == (2, 6, 6, 3)
    assert main(["convert", wanted, "--to", str(tmp_path / "x")]) == 2
    assert "--from" in capsys.readouterr().err


def test_a_vocabulary_of_another_size_is_refused(tmp_path):
    model = shuffled(small_model(dtype=torch.float32))
    torch.save(to_theirs(dict(model.state_dict()), model.config, reverse=True), tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"weights for 23 symbols, and its vocabulary 2\."):
        read_model(tmp_path, "original", vocab=Vocab("word", ("<eos>", "<unk>")))


def test_lengths_come_from_the_recipe_of_the_same_shape(tmp_path):
    """Sizes of the published WikiText-103 model with one layer's arrays would be large: a recipe is made to fit."""
    from transformer_xl.interop import configure

    model = shuffled(small_model(dtype=torch.float32, **SLICES))
    state = to_theirs(dict(model.state_dict()), model.config, reverse=True)
    torch.save(state, tmp_path / "model.pt")
    recipe = RunConfig(
        model=replace(model.config, untie_r=True),
        corpus=CorpusConfig(name="ptb", unit="word"),
        train=TrainConfig(tgt_len=20, mem_len=20),
        eval=EvalConfig(tgt_len=8, mem_len=40, attn_len=40, clamp_len=30),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configure, "packaged_recipes", lambda: {"made-up": Path("x")})
        patch.setattr(configure, "load_recipe", lambda name: recipe)
        found = read_model(tmp_path, "original", vocab=WORDS)
        source = Source(tmp_path, "tensorflow", dict(state))
        window = configure.run_settings(source).eval_lengths
    assert same(found.model(), model)
    assert found.config.eval_lengths == recipe.eval_lengths and found.config.train.tgt_len == 20
    assert found.config.corpus == recipe.corpus and any("recipe made-up" in line for line in found.report)
    assert window == replace(recipe.eval_lengths, attn_len=41)  # TensorFlow's same_length sees one key more


def test_zero_memory_is_zeros_that_are_attended():
    model = small_model(zero_memory=True)
    plain = small_model()
    ids = text(2, 7)
    from transformer_xl.memory import Memory

    lengths = Lengths(tgt_len=7, mem_len=5)
    zeros = Memory.zeros(3, 2, 5, 14, dtype=torch.float64)
    nll, memory = model(ids, ids, None, lengths)
    wanted, after = plain(ids, ids, zeros, lengths)
    assert torch.equal(nll, wanted) and all(map(torch.equal, memory.layers, after.layers))
    assert not torch.allclose(nll, plain(ids, ids, None, lengths)[0])
    again = model(ids, ids, memory.reset(torch.tensor([True, False])), lengths)[0]
    assert torch.equal(again[0], nll[0]) and not torch.allclose(again[1], nll[1])
