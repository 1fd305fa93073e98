"""Training: a resumed run has the bits of an uninterrupted one, and chunks change only the memory in use."""

from __future__ import annotations

import json
import os
import signal
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from small_models import BASELINES
from tiny_runs import without_clock
from torch import Tensor
from torch.overrides import TorchFunctionMode

from transformer_xl.commands.main import main
from transformer_xl.config.recipe import load_recipe
from transformer_xl.config.settings import EvalConfig, RunConfig, TrainConfig, TransformerXLConfig
from transformer_xl.data.corpus import Corpus
from transformer_xl.data.datasets import open_corpus
from transformer_xl.data.loader import StreamLoader
from transformer_xl.evaluation import score
from transformer_xl.evaluation.score import evaluate
from transformer_xl.mistake import Mistake
from transformer_xl.model.baselines import build_model
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.ops import BACKENDS, native
from transformer_xl.run.checkpoint import load_training, load_weights
from transformer_xl.run.folder import Run
from transformer_xl.run.metrics import Metrics, validations
from transformer_xl.run.parts import read_header
from transformer_xl.runtime.files import LOCK
from transformer_xl.runtime.ranks import Ranks
from transformer_xl.train import loop
from transformer_xl.train.choices import choices, resolve_settings
from transformer_xl.train.half import FIRST_SCALE, GROWTH_STEPS, LossScale
from transformer_xl.train.loop import fit, train_segments
from transformer_xl.train.objective import Objective
from transformer_xl.train.step import MOST_SKIPPED, Trainer

SHAPE = TransformerXLConfig(
    vocab_size=256, n_layer=2, n_head=2, d_head=3, d_model=6, d_inner=7, dropout=0.1, dropatt=0.1
)
RECURRENT = [
    TransformerXLConfig(
        vocab_size=256, kind=kind, n_layer=2, d_model=6, d_inner=7, locked_dropout=True, dropout=0.3, dropout_words=0.2,
        dropout_input=0.4, dropout_output=0.1, weight_drop=0.5,
    )
    for kind in ("lstm", "qrnn")
]  # fmt: skip
TRAIN = TrainConfig(
    tgt_len=5, mem_len=7, batch_size=6, max_steps=8, lr=0.01, warmup_steps=2, device="cpu", precision="fp32",
    backend="strided", log_every=2, eval_every=4, save_every=3, keep=9,
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    text = np.random.default_rng(1).integers(97, 107, 2000).astype(np.uint8).tobytes()
    splits = {"train": text, "valid": text[:300], "test": text[:200]}
    return Corpus.build(tmp_path_factory.mktemp("store") / "corpus", splits, name="letters")


def start(shape: TransformerXLConfig = SHAPE, **changes: object) -> tuple[TransformerXL, RunConfig]:
    torch.manual_seed(3)
    config = RunConfig(model=shape, train=replace(TRAIN, **changes), eval=EvalConfig(batch_size=3))
    return build_model(shape), config


def trainer_of(corpus: Corpus, shape: TransformerXLConfig = SHAPE, **changes: object) -> Trainer:
    model, config = start(shape, **changes)
    return Trainer(model, StreamLoader(corpus.split("train"), batch_size=6, tgt_len=5), config.train)


def run(corpus: Corpus, folder: Path, *, resume: bool = False, **changes: object) -> tuple[TransformerXL, bool]:
    model, config = start(**changes)
    return model, fit(model, corpus, config, folder, resume=resume)


AWD = {
    "mem_len": 0, "context_len": 6, "random_tgt_len": True, "ar_alpha": 0.2, "tar_beta": 0.1, "average_from": 3,
    "embedding_lr_ratio": 2.0, "min_lr_ratio": 0.3,
}  # fmt: skip


def test_settings_of_the_text_reach_the_loader_and_validation(corpus, tmp_path):
    def segments(**changes: object) -> StreamLoader:
        return train_segments(corpus, start(**changes)[1])

    assert segments(passes=3).targets == 3 * 2000 - 1
    lengths = [[s.ids.shape[1] for s in segments(random_tgt_len=True, seed=seed)] for seed in (1, 1, 2)]
    assert lengths[0] == lengths[1] != lengths[2]
    run(corpus, tmp_path / "run", eval_tokens=70, keep=1)
    assert len(Run(tmp_path / "run").checkpoints()) <= 2
    with pytest.raises(FileExistsError, match="holds checkpoints"):
        run(corpus, tmp_path / "run")
    entries = Run(tmp_path / "run").metrics.entries()
    assert {entry["targets"] for entry in entries if entry.get("split") == "valid"} == {70}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "muon", "momentum": 0.9},
        {"optimizer": "sgd", "momentum": 0.5},
        AWD,
        {"shape": replace(SHAPE, ngrams=(2, 3), ngram_rows=31, matches=(2,), match_window=9, document_end=100)},
        {"tgt_len": 6, "mem_len": 8, "short_share": 0.75, "shape": replace(SHAPE, ngrams=(2, 3), ngram_rows=31)},
        {"tgt_len": 6, "mem_len": 8, "short_share": 5 / 8},
        {"precision": "fp16"},
        *({"loss": "half", "shape": replace(SHAPE, **kind)} for kind in BASELINES.values()),
        *({"mem_len": 1, "tar_beta": 0.5, "shape": kind} for kind in RECURRENT),
    ],
)
def test_resuming_gives_the_bits_of_a_run_that_never_stopped(corpus, tmp_path, changes):
    whole, finished = run(corpus, tmp_path / "whole", **changes)
    assert finished
    _interrupted(corpus, tmp_path / "cut", after=5, **changes)
    resumed, finished = run(corpus, tmp_path / "cut", resume=True, **changes)
    assert finished
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert without_clock(tmp_path / "whole") == without_clock(tmp_path / "cut")


def _interrupted(
    corpus: Corpus, folder: Path, *, after: int, numbers: Sequence[int] = (signal.SIGTERM,), **changes: object
) -> None:
    """Train until a signal arrives during step `after`."""
    model, config = start(**changes)
    steps = []

    def send(module, inputs, output):
        if module.training:
            steps.append(1)
            if len(steps) == after:
                for number in numbers:
                    os.kill(os.getpid(), number)

    handle = model.backbone.layers[0].register_forward_hook(send)
    assert not fit(model, corpus, config, folder)
    handle.remove()
    assert load_training(Run(folder).latest).step == read_header(Run(folder).latest)["step"] == after


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("changes", [{"eval_every": 3}, AWD, {"eval_every": 0}])
def test_a_signal_ends_a_validation_and_resuming_repeats_it(corpus, tmp_path, monkeypatch, changes):
    run(corpus, tmp_path / "whole", **changes)
    read = []

    def signalled(model, segments, *args, **settings):
        os.kill(os.getpid(), signal.SIGTERM)
        segments = [*segments]
        read.append(len(segments))
        return evaluate(model, segments, *args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(score, "evaluate", signalled)
        assert not run(corpus, tmp_path / "cut", **changes)[1]
    cut = Run(tmp_path / "cut")
    assert read == [1] and not validations(cut.metrics.entries()) and read_header(cut.latest)["valid_loss"] is None
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # killed before it saves
        patch.setattr(loop, "save_checkpoint", interrupt)
        run(corpus, tmp_path / "cut", resume=True, **changes)
    assert run(corpus, tmp_path / "cut", resume=True, **changes)[1]
    assert without_clock(tmp_path / "whole") == without_clock(tmp_path / "cut")
    for each in Run(tmp_path / "whole").checkpoints():
        assert read_header(each) == read_header(cut.checkpoint(load_training(each).step))


@pytest.fixture
def hangup() -> Iterator[None]:
    """Set SIGHUP as a shell sets it for a program, because nohup may have started these tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "numbers", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGHUP] * 2, [signal.SIGTERM, signal.SIGHUP]]
)
def test_a_signal_finishes_the_step_and_saves(corpus, tmp_path, numbers, hangup):
    """SIGHUP may come twice, or after SIGTERM, when a terminal or a session ends."""
    before = [signal.getsignal(number) for number in numbers]
    _interrupted(corpus, tmp_path, after=2, numbers=numbers)
    assert [signal.getsignal(number) for number in numbers] == before


def test_nohup_keeps_ignoring_sighup(hangup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with loop._deferred_signals(Ranks()) as received:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not received
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_handler_that_is_not_pythons_stays(monkeypatch):
    """A program around this one, in C, may have set it: Python cannot set it again."""
    known, number = signal.getsignal, signal.SIGTERM
    before = known(number)
    monkeypatch.setattr(signal, "getsignal", lambda each: None if each == number else known(each))
    with loop._deferred_signals(Ranks()):
        assert known(number) == before
    assert known(number) == before


def test_one_of_several_ranks_leaves_a_second_signal_to_its_launcher(hangup):
    with loop._deferred_signals(Ranks(0, 2)) as received:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert received == ["SIGTERM", "SIGHUP", "SIGTERM", "SIGINT", "SIGINT"]


def test_training_outside_the_main_thread_works(corpus, tmp_path):
    results = []
    worker = threading.Thread(target=lambda: results.append(run(corpus, tmp_path, max_steps=1)[1]))
    worker.start()
    worker.join()
    assert results == [True]


def test_memory_starts_empty_in_each_epoch(corpus):
    loader = StreamLoader(corpus.split("train").ids[:84], batch_size=6, tgt_len=5)
    trainer = Trainer(start()[0], loader, replace(TRAIN, mem_len=100))
    lengths = []
    for _ in range(2 * len(loader)):
        trainer.advance()
        lengths.append(trainer.memory.length)
    assert lengths == [5, 10, 14, 5, 10, 14]


def test_short_steps_are_those_of_half_the_lengths_and_twice_the_rows(corpus):
    shape, settings = replace(SHAPE, dropout=0.0, dropatt=0.0), replace(TRAIN, tgt_len=6, mem_len=8, max_steps=8)
    loader = StreamLoader(corpus.split("train"), batch_size=6, tgt_len=6)
    grown = Trainer(start(shape)[0], loader, replace(settings, short_share=0.5))
    other = Trainer(start(shape)[0], loader.short(), replace(settings, tgt_len=3, mem_len=4, batch_size=12))
    for _ in range(4):
        assert grown.advance() == other.advance()
    assert torch.equal(grown.memory.layers[1], other.memory.layers[1])
    other.loader, other.config, other.memory = loader, settings, other.model.empty_memory(6, settings.lengths)
    for _ in range(4):
        assert grown.advance() == other.advance()
    assert grown.memory.layers[0].shape == (6, 8, 6)


@pytest.mark.parametrize("spoilt", ["gradient", "loss"])
def test_a_step_without_a_finite_loss_and_gradient_changes_nothing(corpus, monkeypatch, spoilt):
    trainer, forward = trainer_of(corpus), Objective.forward
    trainer.advance()
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    memory = trainer.memory

    def infinite(self, *call, **options):
        loss, nll, after = forward(self, *call, **options)
        return (loss * torch.nan, nll, after) if spoilt == "gradient" else (loss, nll + torch.inf, after)

    with monkeypatch.context() as patch:
        patch.setattr(Objective, "forward", infinite)
        assert trainer.advance().skipped and trainer.skipped == 1
    assert trainer.memory is memory
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.model.parameters(), strict=True))
    assert not trainer.advance().skipped and trainer.skipped == 0


def test_an_overflow_in_fp16_halves_the_scale_and_is_no_failure(corpus):
    """In more steps than may fail; resumed between them, it goes on with the same bits."""
    trainer, again = (trainer_of(corpus, precision="fp16") for _ in "ab")
    trainer.scale.value = 2.0**40
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    for skipped in range(MOST_SKIPPED + 1):
        result = trainer.advance()
        assert result.overflowed and trainer.scale.value == 2.0 ** (39 - skipped) and trainer.skipped == 0
    assert all(map(torch.equal, weights, trainer.model.parameters()))
    assert trainer.pace.entry("byte")["overflows"] == MOST_SKIPPED + 1 and trainer.pace.skipped == 0
    again.model.load_state_dict(trainer.model.state_dict())
    half_way = trainer.state()
    results = [trainer.advance() for _ in range(30)]
    again.restore(half_way)
    assert str(results) == str([again.advance() for _ in range(30)]), "nan included"
    assert not results[-1].skipped and trainer.scale == again.scale
    assert all(map(torch.equal, trainer.model.parameters(), again.model.parameters()))


@pytest.mark.parametrize("scale", [FIRST_SCALE, 1.0])
def test_an_overflow_of_the_n_grams_alone_is_skipped_too(corpus, scale):
    """Their table is not in the norm of the gradients."""
    trainer = trainer_of(corpus, replace(SHAPE, ngrams=(2, 3), ngram_rows=31), precision="fp16")
    trainer.scale.value, table = scale, trainer.model.ngrams.table.weight
    table.register_hook(lambda grad: grad * torch.inf)
    before = table.detach().clone()
    assert trainer.advance().skipped and torch.equal(table, before)


def test_the_loss_scale_doubles_after_many_steps_and_is_1_at_least():
    scale = LossScale(FIRST_SCALE)
    for _ in range(GROWTH_STEPS):
        assert scale.value == 2.0**16
        scale.update(overflowed=False)
    assert scale == LossScale(2.0**17)
    for _ in range(20):
        scale.update(overflowed=True)
    assert scale == LossScale(1.0)


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, ngrams=(2, 3), ngram_rows=31)], ids=["dense", "sparse"])
def test_scaling_the_loss_changes_no_bit_in_fp32(corpus, shape):
    found = []
    for scale in (1.0, 2.0**20):
        trainer = trainer_of(corpus, shape)
        assert trainer.scale == LossScale(1.0)
        trainer.scale.value = scale
        results = [trainer.advance()._replace(scale=1.0) for _ in range(4)]
        found.append([*map(str, results), *(p.tolist() for p in trainer.model.parameters())])
    assert found[0] == found[1]


class Waits(TorchFunctionMode):
    """Counts the reads of floating-point tensors, which wait for a device. Counts of tokens are read on the host."""

    READS = (Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in self.READS and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_step_waits_for_the_device_once_and_reduces_once(corpus, monkeypatch, chunks):
    reductions = []
    for name in ("total", "gather"):
        original = getattr(Ranks, name)
        monkeypatch.setattr(
            Ranks, name, lambda self, x, name=name, call=original: reductions.append(name) or call(self, x)
        )
    trainer = trainer_of(corpus, batch_chunk=chunks, ar_alpha=0.2, tar_beta=0.1)
    trainer.optimizers = []  # Adam reads its own count, which is on the host
    with Waits() as waits:
        result = trainer.advance(["a signal"])
    assert (waits.count, reductions, result.signals) == (1, ["total"], 1)


AVERAGED = {"average_from": 4, "min_lr_ratio": 0.5}


def test_averaged_weights_are_scored_and_saved(corpus, tmp_path):
    model, _ = run(corpus, tmp_path, **AVERAGED)
    losses = {e["split"]: e["loss"] for e in Metrics(tmp_path / "metrics.jsonl").entries() if e["step"] == 8}
    assert losses.keys() == {"train", "valid", "valid-average"} and losses["valid"] != losses["valid-average"]
    assert read_header(Run(tmp_path).latest)["valid_loss"] == losses["valid-average"]
    known = validations(Metrics(tmp_path / "metrics.jsonl").entries())
    assert [(e["step"], e["split"]) for e in known] == [(4, "valid"), (8, "valid-average")]
    final = {"step": 8, "split": "valid", "loss": 1.0, "checkpoint": "step_00000008"}
    assert validations([*known, final]) == known
    saved, first = (start()[0] for _ in range(2))
    load_weights(saved, Run(tmp_path).latest)
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))
    trainer = Trainer(first, StreamLoader(corpus.split("train"), batch_size=6, tgt_len=5), replace(TRAIN, **AVERAGED))
    torch.manual_seed(TRAIN.seed)
    seen = []
    for _ in range(8):
        trainer.advance()
        seen.append([p.detach().clone() for p in first.parameters()])
    for mean, *weights in zip(saved.parameters(), *seen[4:], strict=True):
        torch.testing.assert_close(mean, torch.stack(weights).mean(0))


def test_the_learning_rate_follows_the_length_of_a_segment(corpus):
    config = replace(TRAIN, random_tgt_len=True, warmup_steps=0, schedule="constant")
    loader = StreamLoader(corpus.split("train"), batch_size=6, tgt_len=5, random_seed=1)
    trainer = Trainer(start()[0], loader, config)
    for step in range(6):
        trainer.advance()
        length = loader.segment(step).ids.shape[1]
        assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(config.lr * length / 5)


def test_a_process_of_a_launch_does_not_train_alone(corpus, tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Mistake, match="fit must get the ranks of its launch of 2 processes"):
        fit(start()[0], corpus, RunConfig(train=TRAIN), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_of_fit_goes_on_by_the_command_and_back(own_folder, capsys):
    """`fit` leaves the folder of `txl train`; an ended run says so."""
    Path("text.txt").write_text("a few words, again and again\n" * 200)
    sizes = "--model.n-layer 1 --model.d-model 8 --model.d-inner 8 --model.n-head 2 --model.d-head 4"
    config = load_recipe("text-small", [*sizes.split(), "--train.max-steps", "2"], data="text.txt")
    corpus = open_corpus(config.corpus)
    model = TransformerXL(resolve_settings(config, corpus).model)
    assert fit(model, corpus, config, "run")  # with settings that are still "auto"
    out = capsys.readouterr().out
    assert "M parameters on text.txt" in out and "step 2/2" in out
    facts = json.loads(Path("run/environment.json").read_text())
    assert facts["chosen"]["device"] == choices(config.train, config.model)["device"] and facts["recipe"] == ""
    assert facts["chosen"]["device"]["why"] != "as the settings say", "the device was auto"
    assert set(facts["corpus"]) == {"train", "valid", "test"}
    assert load_recipe("run/config.toml") == resolve_settings(config, corpus)
    assert main(["train", "--out", "run", "text-small", "--data", "text.txt", *sizes.split()]) == 2
    assert "run exists. Go on with it by txl train --resume" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", "run", "--train.max-steps", "4"]) == 0
    assert "Resumed from step 2 of 4" in capsys.readouterr().out
    assert main(["report", "run"]) == 0 and Path("run/report.html").is_file()
    capsys.readouterr()
    config = replace(config, train=replace(config.train, max_steps=4))
    assert fit(model, corpus, config, "run", resume=True)
    assert "Resumed from step 4 of 4 (step_00000004). All 4 steps are done" in capsys.readouterr().out
    assert [entry["step"] for entry in Metrics(Path("run/metrics.jsonl")).entries() if "lr" in entry] == [2, 4]


def test_fit_computes_as_the_settings_say_and_leaves_the_model_dense(corpus, tmp_path, monkeypatch):
    used: list[str] = []
    chunked = BACKENDS["chunked"]
    monkeypatch.setitem(BACKENDS, "chunked", lambda call: (used.append("chunked"), chunked(call))[1])
    shape = replace(SHAPE, ngrams=(2,), ngram_rows=31)
    model, _ = run(corpus, tmp_path / "run", shape=shape, backend="chunked", recompute=True, max_steps=2)
    assert len(used) == 2 * 2 * SHAPE.n_layer, "each layer of each step is computed again"
    assert not model.ngrams.table.sparse and not model.backbone.recompute
    assert {layer.attention.backend for layer in model.backbone.layers} == {"auto"}
    with pytest.raises(ValueError, match=r"train\.recompute must be false for kind = lstm"):
        run(corpus, tmp_path / "lstm", shape=RECURRENT[0], mem_len=1, recompute=True)


def test_a_run_goes_on_as_it_began(corpus, tmp_path):
    run(corpus, tmp_path)
    before = (tmp_path / "config.toml").read_bytes()
    for changes, sentence in (
        ({"optimizer": "sgd"}, r"train\.optimizer is adam in .*, and cannot change now"),
        ({"mem_len": 6}, r"train\.mem_len is 7"),
        ({"max_steps": 7}, r"train\.max_steps must be at least 8, the step that .* has reached, got 7"),
        ({"shape": replace(SHAPE, dropout=0.2)}, r"model\.dropout is 0\.1"),
    ):
        with pytest.raises(Mistake, match=sentence):
            run(corpus, tmp_path, resume=True, **{"max_steps": 9} | changes)
    other = Corpus.build(tmp_path / "other", {"train": b"abc" * 300, "valid": b"abc" * 99}, name="letters")
    with pytest.raises(Mistake, match=r"letters has changed since .* began: the SHA-256 of .* differs"):
        run(other, tmp_path, resume=True, max_steps=9)
    assert (tmp_path / "config.toml").read_bytes() == before
    with FileLock(tmp_path / LOCK), pytest.raises(BlockingIOError, match="in use by another process"):
        run(corpus, tmp_path, resume=True, max_steps=9)
    assert run(corpus, tmp_path, resume=True, max_steps=9, backend="chunked", precision="auto")[1]


def test_a_setting_that_someone_wrote_into_config_toml_is_refused(corpus, tmp_path):
    """The last checkpoint says how the run was trained."""
    run(corpus, tmp_path, max_steps=4)
    own = Run(tmp_path).settings()
    Run(tmp_path).write_settings(replace(own, train=replace(own.train, lr=0.5, max_steps=8)))
    with pytest.raises(Mistake, match=r"train\.lr is 0\.01 in .*, and cannot change now[^\n]*\n.*toml was edited"):
        run(corpus, tmp_path, resume=True, lr=0.5)
    assert run(corpus, tmp_path, resume=True)[1]
    (tmp_path / "config.toml").write_text("[train]\nlr = -1\nfoo = 3\n")
    with pytest.raises(Mistake, match=r"train\.foo is not a setting") as error:
        run(corpus, tmp_path, resume=True)
    assert error.value.__notes__ == [
        f"That is in {tmp_path / 'config.toml'}. If it was edited or damaged, restore it; if a newer version wrote it, "
        "update transformer-xl."
    ]


def test_a_sample_of_a_diverged_model_does_not_end_the_run(corpus, tmp_path, monkeypatch, capsys):
    """The steps stop it, and name the first infinity."""

    def diverged(*_: object, **__: object) -> None:
        raise FloatingPointError("The model's probabilities are not numbers (nan).")

    monkeypatch.setattr(loop, "generate", diverged)
    assert run(corpus, tmp_path, sample_every=3)[1]
    assert "No sample at step 3: The model's probabilities are not numbers" in capsys.readouterr().out


def test_a_backend_of_the_cpu_is_refused_on_a_gpu_before_training(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Mistake, match="must be one that can serve here, got chunked: it is for the CPU"):
        choices(replace(TRAIN, device="cuda:0", backend="chunked"), SHAPE)


def test_a_run_of_a_gpu_goes_on_on_a_cpu(corpus, tmp_path):
    """With a backend of the CPU, unless one is named."""
    run(corpus, tmp_path, max_steps=2)
    began = Run(tmp_path).settings()
    on_card = replace(began.train, device="cuda:0", backend="triton", cuda_graph=True)
    Run(tmp_path).write_settings(replace(began, train=on_card))
    with pytest.raises(Mistake, match=r"must be one that can serve here, got triton"):
        run(corpus, tmp_path, resume=True, max_steps=3, backend="triton")
    assert run(corpus, tmp_path, resume=True, max_steps=3, backend="auto")[1]


def test_what_does_not_fit_is_refused_before_anything_is_written(corpus, tmp_path, monkeypatch):
    model, config = start(shape=replace(SHAPE, document_end=97))
    shuffled = replace(config, corpus=replace(config.corpus, shuffle_lines=True, document_end="a"))
    with pytest.raises(Mistake, match=r"shuffle_lines must be false where corpus\.document_end is not"):
        fit(model, corpus, shuffled, tmp_path / "run")
    with pytest.raises(Mistake, match=r"batch_size must be a multiple of 4, .* got 6"):
        fit(model, corpus, config, tmp_path / "run", ranks=Ranks(0, 4))
    normed = start(shape=replace(SHAPE, qk_norm=True))[0]
    with pytest.raises(Mistake, match=r"train\.parallel must be ddp with model\.qk_norm"):
        fit(normed, corpus, replace(config, train=replace(TRAIN, parallel="fsdp")), tmp_path / "run", ranks=Ranks(0, 2))
    with pytest.raises(Mistake, match="cuda_graph must be false with several ranks"):
        fit(model, corpus, replace(config, train=replace(TRAIN, cuda_graph=True)), tmp_path / "run", ranks=Ranks(0, 2))
    with pytest.raises(Mistake, match="cuda_graph needs a CUDA device"):
        fit(model, corpus, replace(config, train=replace(TRAIN, cuda_graph=True)), tmp_path / "run")
    compiled, headers = replace(config, train=replace(TRAIN, compile=True)), sysconfig.get_path("include")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": "headers"})
    with pytest.raises(Mistake, match=r"compile must be false on a CPU without a C\+\+ compiler and headers/Python\.h"):
        fit(model, corpus, compiled, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("CPATH", headers)
    if native.compiler() and Path(headers, "Python.h").exists():
        assert resolve_settings(compiled, corpus).train.compile
