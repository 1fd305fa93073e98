"""A checkpoint restores what was saved, is whole or absent, and damage is reported in one sentence."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import signal
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save_file
from torch import nn

from transformer_xl.config.settings import (
    CorpusConfig,
    EvalConfig,
    Lengths,
    RunConfig,
    TrainConfig,
    TransformerXLConfig,
)
from transformer_xl.data.vocab import Vocab
from transformer_xl.mistake import Mistake
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.run import parts
from transformer_xl.run.checkpoint import (
    TrainingState,
    load_config,
    load_model,
    load_training,
    load_weights,
    save_checkpoint,
)
from transformer_xl.run.folder import Run, find_checkpoint
from transformer_xl.runtime import files

VOCAB = Vocab("char", tuple("abcdefghijklmnopqrs"))
SHAPE = TransformerXLConfig(
    vocab_size=19, n_layer=2, n_head=3, d_head=5, d_model=14, d_inner=11,
    cutoffs=(7, 13), div_val=2, tie_projs=(False, True, True),
)  # fmt: skip
CONFIG = RunConfig(
    model=replace(SHAPE, vocab_size=0),
    corpus=CorpusConfig(name="letters", unit="char"),
    train=TrainConfig(tgt_len=5, mem_len=7, betas=(0.8, 0.9)),
    eval=EvalConfig(mem_len=23),
)
LENGTHS = Lengths(tgt_len=5, mem_len=7)


@pytest.fixture
def model() -> TransformerXL:
    torch.manual_seed(0)
    return TransformerXL(SHAPE)


def save(run, model, step, config=None, **options):
    path = Run(run).checkpoint(step)
    return save_checkpoint(path, model=model, vocab=VOCAB, config=config or CONFIG, step=step, **options)


def altered(folder):
    """The checkpoint without checksums, so a test can change its files."""
    (folder / files.SEAL).unlink()
    return folder


def snapshot(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["int8", "int64", "bool", "uint8", "float8_e4m3fn", "complex64"])
def test_weights_that_are_no_weights_are_refused(tmp_path, model, kind):
    """They would be cast; quantised weights would load without their scales."""
    folder = altered(save(tmp_path, model, 3))
    stored = load((folder / "model.safetensors").read_bytes())  # load_file would map what is written below
    name = "backbone.layers.0.attention.qkv.weight"
    stored[name] = stored[name].to(getattr(torch, kind))
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(Mistake, match=rf"does not fit the model: wrong type: {name} is {kind}\. Use"):
        load_model(folder)
    stored[name] = torch.randn(45, 14, dtype=torch.float16)
    save_file(stored, folder / "model.safetensors")
    load_model(folder)


def test_a_loaded_model_computes_the_same_as_the_saved_one(tmp_path, model):
    folder = save(tmp_path, model, 3)
    model.eval()
    ids = torch.randint(19, (2, 5))
    expected, _ = model(ids, ids, None, LENGTHS)
    loaded = load_model(folder)
    got, _ = loaded.model(ids, ids, None, LENGTHS)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert not loaded.model.training
    assert loaded.vocab == VOCAB
    assert loaded.config == replace(CONFIG, model=SHAPE)  # the model's own sizes, where the recipe left them open


def test_tied_weights_are_stored_once_and_tied_again(tmp_path, model):
    folder = save(tmp_path, model, 3)
    stored = parts.read_tensors(folder / "model.safetensors")
    assert sum(value.numel() for value in stored.values()) == sum(p.numel() for p in model.parameters())
    loaded = load_model(folder).model
    assert loaded.softmax.tables[1] is loaded.embedding.tables[1]
    assert loaded.softmax.projections[2] is loaded.embedding.projections[2]
    assert loaded.softmax.projections[0] is not loaded.embedding.projections[0]


def test_a_tie_may_be_stored_under_any_of_its_names(tmp_path, model):
    folder = altered(save(tmp_path, model, 3))
    path = folder / "model.safetensors"
    stored = parts.read_tensors(path)
    stored["softmax.tables.1"] = stored.pop("embedding.tables.1")
    parts.write_tensors(path, stored)
    torch.testing.assert_close(load_model(folder).model.embedding.tables[1], model.embedding.tables[1], rtol=0, atol=0)


def test_overlapping_views_of_one_storage_are_saved_apart(tmp_path):
    whole = torch.arange(6.0)
    parts.write_tensors(tmp_path / "x.safetensors", {"low": whole[:4], "high": whole[2:], "odd": whole[1::2]})
    read = parts.read_tensors(tmp_path / "x.safetensors")
    got = {name: value.tolist() for name, value in read.items()}
    assert got == {"low": [0, 1, 2, 3], "high": [2, 3, 4, 5], "odd": [1, 3, 5]}


def test_loading_leaves_the_callers_random_numbers_alone(tmp_path, model):
    folder = save(tmp_path, model, 3)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model(folder)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_weights_load_into_a_model_of_another_dtype(tmp_path, model):
    folder = save(tmp_path, model, 3)
    other = TransformerXL(SHAPE).double()
    load_weights(other, folder)
    torch.testing.assert_close(other.backbone.content_bias, model.backbone.content_bias.double(), rtol=0, atol=0)
    assert other.softmax.tables[0] is other.embedding.tables[0]


def test_the_layout_is_as_documented_and_nothing_is_pickled(tmp_path, model):
    folder = save(tmp_path, model, 4000, training=TrainingState(4000))
    assert folder == tmp_path / "checkpoints" / "step_00004000"
    names = {path.name for path in folder.iterdir()}
    training = {"training.safetensors", "training.json"}
    assert names == {"model.safetensors", "config.json", "vocab.json", "SHA256SUMS"} | training
    for content in snapshot(folder).values():
        with suppress(Exception):
            value = pickle.loads(content)  # the first bytes may by chance be those of a constant
            assert value is None or isinstance(value, bool | int)


def test_all_files_are_as_readable_as_new_ones_are(tmp_path, model):
    (tmp_path / "new").touch()
    folder = save(tmp_path, model, 1)
    assert {file.stat().st_mode for file in folder.iterdir()} == {(tmp_path / "new").stat().st_mode}


def test_saving_a_step_again_replaces_it_whole(tmp_path, model):
    save(tmp_path, model, 3, training=TrainingState(3))
    nn.init.constant_(model.backbone.content_bias, 2.0)
    folder = save(tmp_path, model, 3)
    assert load_model(folder).model.backbone.content_bias.eq(2.0).all()
    assert not (folder / "training.json").exists()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000003"]


def test_a_folder_of_other_files_is_not_replaced(tmp_path, model):
    mine, empty, clone = tmp_path / "mine", tmp_path / "empty", tmp_path / "clone"
    mine.mkdir(), empty.mkdir(), (clone / ".git").mkdir(parents=True)
    (empty / ".DS_Store").touch()
    (mine / "chapter.txt").write_text("mine")
    for path, what in ((mine, "it holds chapter"), (mine / "chapter.txt", "it is a file"), (clone, "it holds .git")):
        with pytest.raises(FileExistsError, match=f"must be a new folder, and {what}"):
            save_checkpoint(path, model=model, vocab=VOCAB, config=RunConfig())
    assert {file.name for file in tmp_path.rglob("*.*")} == {"chapter.txt", ".DS_Store", ".git"}, "nothing else is left"
    assert save_checkpoint(empty, model=model, vocab=VOCAB, config=RunConfig()) == empty


def test_one_sentence_lists_every_mismatch(tmp_path, model):
    folder = save(tmp_path, model, 3)
    other = TransformerXL(replace(SHAPE, n_layer=3, d_inner=13, final_norm=True))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        load_weights(other, folder)
    message = str(caught.value)
    assert "missing: backbone.layers.2." in message and "and 5 more" in message
    assert (
        "wrong shape: backbone.layers.0.feed_forward.inner.weight is 11x14 in the file and 13x14 in the model"
        in message
    )
    with pytest.raises(ValueError, match=r"unexpected: backbone\.layers\.1"):
        load_weights(TransformerXL(replace(SHAPE, n_layer=1)), folder)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "vocab.json", "training.safetensors"])
def test_a_changed_cut_or_missing_file_is_refused_in_one_sentence(tmp_path, model, name):
    folder = save(tmp_path, model, 3, training=TrainingState(3, tensors={"x": torch.ones(3)}))
    path, load_from = folder / name, load_training if name.startswith("training") else load_model
    whole = path.read_bytes()
    for content in (whole[:-1] + b" ", whole[:-1], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} is cut short, damaged or of another kind"):
            load_from(folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing|holds no checkpoint"):
        load_from(folder)
    with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
        load_from(tmp_path)


def test_foreign_files_are_refused_in_one_sentence(tmp_path, model):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist\. Name a run folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        load_model(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    with pytest.raises(FileNotFoundError, match="run has no checkpoint yet"):
        load_model(tmp_path / "run")
    torch.save({"weight": torch.ones(9999)}, tmp_path / "model.pt")
    with pytest.raises(FileNotFoundError, match=r"model\.pt holds no checkpoint"):
        load_model(tmp_path / "model.pt")
    folder = save(tmp_path, model, 3)
    (tmp_path / "model.pt").replace(altered(folder) / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is cut short, damaged or of another kind"):
        load_model(folder)
    (folder / "config.json").write_text("[" * 99_999)
    with pytest.raises(ValueError, match=r"config\.json is cut short, damaged or of another kind"):
        load_model(folder)
    (folder / "config.json").write_text('{"architectures": ["TransfoXLLMHeadModel"]}')
    with pytest.raises(ValueError, match="not a checkpoint of transformer-xl"):
        load_model(folder)


def test_other_settings_in_the_config_are_named(tmp_path, model):
    folder = altered(save(tmp_path, model, 3))
    path = folder / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"model": content["model"] | {"n_layers": 3}, "train": {"speed": "fast"}}))
    with pytest.raises(ValueError, match=r"model\.n_layers is not a setting.* train\.speed is not a setting"):
        load_config(folder)
    path.write_text(json.dumps(content | {"version": 3}))
    with pytest.raises(ValueError, match="format version 3"):
        load_config(folder)
    path.write_text(json.dumps(content | {"model": content["model"] | {"n_layer": "three"}}))
    with pytest.raises(ValueError, match="must be"):
        load_config(folder)
    del content["train"]["betas"], content["eval"]
    path.write_text(json.dumps(content))  # an older version, that did not have these
    assert load_config(folder).train.betas == TrainConfig().betas


@pytest.mark.parametrize(
    "sizes", [{"n_layer": 9999}, {"d_inner": 999_999}, {"d_embed": 10**6}, {"ngrams": [2], "ngram_rows": 1 << 27}]
)
def test_sizes_beyond_the_stored_weights_are_refused_before_memory_is_taken(tmp_path, model, sizes):
    path = altered(save(tmp_path, model, 3)) / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"model": content["model"] | sizes}))
    with pytest.raises(ValueError, match=r"config\.json has sizes of more weights"):
        load_model(path.parent)


def test_a_checkpoint_under_another_name_is_no_other_step(tmp_path, model):
    training = TrainingState(3, {"lr": 0.1 + 0.2, "best_loss": float("inf")})
    folder = save(tmp_path, model, 3, training=training)
    assert load_training(folder) == training
    folder.with_name("step_00000099").symlink_to(folder)
    assert Run(tmp_path).step == 3
    with pytest.raises(Mistake, match="must have the name step_00000003"):
        load_training(folder.rename(folder.with_name("step_00000098")))


def test_a_vocabulary_of_another_size_is_refused(tmp_path, model):
    folder = altered(save(tmp_path, model, 3))
    (folder / "vocab.json").write_text(json.dumps(Vocab("char", ("a", "b")).to_json()))
    with pytest.raises(ValueError, match=r"2 tokens and config\.json says model\.vocab_size = 19"):
        load_model(folder)


def test_a_run_is_loaded_from_its_best_checkpoint_and_resumed_from_its_last(tmp_path, model, monkeypatch):
    assert Run(tmp_path).latest is None and Run(tmp_path).best is None
    save(tmp_path, model, 5)
    assert find_checkpoint(tmp_path) == Run(tmp_path).checkpoint(5)
    for step, loss in ((10, 2.0), (20, 1.5), (30, 1.75), (40, float("nan"))):
        save(tmp_path, model, step, valid_loss=loss, training=TrainingState(step))
    assert find_checkpoint(tmp_path) == Run(tmp_path).best == Run(tmp_path).checkpoint(20)
    assert find_checkpoint(tmp_path, which="last") == Run(tmp_path).latest == Run(tmp_path).checkpoint(40)
    assert load_training(tmp_path).step == 40
    save(tmp_path, model, 50, valid_loss=1.5)
    assert Run(tmp_path).best == Run(tmp_path).checkpoint(50), "of equal losses the later one"
    listed = Run(tmp_path).checkpoints()
    shutil.rmtree(Run(tmp_path).checkpoint(10))
    monkeypatch.setattr(Run, "checkpoints", lambda run: listed)
    assert Run(tmp_path).best == Run(tmp_path).checkpoint(50), "training removed another one in the meantime"
    (Run(tmp_path).checkpoint(20) / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        print(Run(tmp_path).best)


@pytest.mark.parametrize("section, changes", [("train", {"eval_tokens": 7}), ("eval", {"mem_len": 0})])
def test_losses_of_another_validation_are_not_compared(tmp_path, model, section, changes):
    """What is scored may change when a run goes on. Then an easier text must not make an older model the best."""
    other = replace(CONFIG, **{section: replace(getattr(CONFIG, section), **changes)})
    for step, loss in ((5, 1.75), (10, 1.5)):
        save(tmp_path, model, step, valid_loss=loss)
    save(tmp_path, model, 20, other, valid_loss=2.5)
    assert Run(tmp_path).best == Run(tmp_path).checkpoint(20)
    spelt = replace(other.eval, split="train", max_tokens=9, tgt_len=other.train.tgt_len)  # the same as None
    split = replace(other, eval=spelt)
    save(tmp_path, model, 30, split, valid_loss=2.75, keep=1)
    assert Run(tmp_path).checkpoints() == [Run(tmp_path).checkpoint(step) for step in (10, 20, 30)]
    assert Run(tmp_path).best == Run(tmp_path).checkpoint(20)


def test_pruning_keeps_the_last_and_the_best(tmp_path, model):
    for step, loss in ((10, 2.0), (20, 1.5), (30, None), (40, 1.75)):
        save(tmp_path, model, step, valid_loss=loss)
    Run(tmp_path).prune(keep=1)
    assert Run(tmp_path).checkpoints() == [Run(tmp_path).checkpoint(20), Run(tmp_path).checkpoint(40)]
    save(tmp_path, model, 50, valid_loss=1.25, keep=2)
    assert Run(tmp_path).checkpoints() == [Run(tmp_path).checkpoint(40), Run(tmp_path).checkpoint(50)]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    for keep in (0, -1):
        with pytest.raises(Mistake, match=rf"^keep must be at least 1, .*, got {keep}\. None keeps all\.$"):
            save(tmp_path, model, 60, keep=keep)
    assert len(Run(tmp_path).checkpoints()) == 3


@contextmanager
def largest_file(size: int):
    """A disk on which no file grows beyond `size` bytes: the kernel refuses, as it does when the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [0, 100, 3000, 12000])
def test_a_full_disk_leaves_older_checkpoints_whole(tmp_path, model, size):
    save(tmp_path, model, 3, training=TrainingState(3, tensors={"x": torch.ones(2)}))
    before = snapshot(tmp_path)
    training = TrainingState(4, tensors={"x": torch.ones(5000)})
    for step in (3, 4):
        with pytest.raises(OSError, match=r"could not be written: .+\. Free some space"), largest_file(size):
            save(tmp_path, model, step, training=training)
        assert snapshot(tmp_path) == before
        assert len(list((tmp_path / "checkpoints").iterdir())) == 1
    load_model(tmp_path)


def test_a_kill_at_any_moment_leaves_only_whole_checkpoints(tmp_path, model, monkeypatch):
    """Kill the process after each system call of saving in turn."""
    save(tmp_path, model, 3)

    class Killed(BaseException):
        pass

    moments, reached = 0, False
    while not reached:
        calls = 0

        def dying(path, moment=moments):
            nonlocal calls
            calls += 1
            if calls > moment:
                raise Killed

        monkeypatch.setattr(files, "sync", dying)
        monkeypatch.setattr(files.shutil, "rmtree", lambda *_, **__: None)  # the dead clean nothing up
        try:
            save(tmp_path, model, 4)
            reached = True
        except Killed:
            for folder in Run(tmp_path).checkpoints():
                load_model(folder)
        monkeypatch.undo()
        moments += 1
    assert moments > 5
    other = tmp_path / "checkpoints" / ".tmp-step_00000005-12345678"  # another process may be writing it
    other.mkdir()
    save(tmp_path, model, 4)
    assert list((tmp_path / "checkpoints").glob(".tmp-*")) == [other]
