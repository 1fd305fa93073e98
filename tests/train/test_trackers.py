"""Trackers get the figures of metrics.jsonl, a resumed run sends nothing twice, and no tracker ends a run."""

from __future__ import annotations

import json
import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from shlex import split as words
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiny_runs import TINY

from transformer_xl.commands.main import main
from transformer_xl.config.settings import RunConfig, TrainConfig
from transformer_xl.run.folder import Run
from transformer_xl.run.metrics import Metrics
from transformer_xl.train.trackers import Trackers, figures, open_trackers, require_installed

CONFIG = RunConfig(train=TrainConfig(max_steps=5, trackers=("wandb", "wandb")))
MORE = words(
    "--train.max-steps 6 --train.eval-every 3 --train.save-every 3 --train.keep 9 --train.sample-every 4"
    " --train.sample-tokens 2 --train.precision fp32 --train.warmup-steps 0 --train.eval-tokens 19 --eval.max-tokens 17"
)


class Fake(ModuleType):
    """A service that keeps what it gets; like the real ones it deletes nothing."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None, origin="somewhere")
        self.inits: list[dict[str, Any]] = []
        self.received: list[tuple[int, dict[str, Any]]] = []
        self.finished = 0
        self.broken_from: float = math.inf
        self.Html = lambda text: SimpleNamespace(html=text)

    def init(self, **options: Any) -> None:
        self.inits.append(options)

    def log(self, values: dict[str, Any], step: int) -> None:
        if step >= self.broken_from:
            raise RuntimeError("no route to host\nand more")
        self.received.append((step, values))

    def finish(self) -> None:
        self.finished += 1

    def figures(self) -> list[tuple[int, dict[str, Any]]]:
        return [(step, values) for step, values in self.received if "sample" not in values]

    def samples(self) -> list[int]:
        return [step for step, values in self.received if "sample" in values]


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch):
    for option in ("PROJECT", "NAME", "DIR"):
        monkeypatch.delenv(f"WANDB_{option}", raising=False)


@pytest.fixture
def wandb(monkeypatch) -> Fake:
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def text(own_folder) -> None:
    Path("text").write_text("abcdefghij\n" * 100)


def train(*more: str) -> int:
    return main(["train", "text-small", "--data", "text", "--out", "runs/a", *TINY, *MORE, *more])


def go_on(*more: str) -> int:
    return main(["train", "text-small", "--out", "runs/a", "--resume", *more])


def measured(run: str = "runs/a") -> list[tuple[int, dict[str, float]]]:
    """The entries of metrics.jsonl as trackers should get them."""
    entries = Metrics(Path(run) / "metrics.jsonl").entries()
    return [(entry["step"], figures(entry)) for entry in entries if "split" in entry]


def events(run: str = "runs/a") -> dict[str, list[tuple[int, Any]]]:
    """What TensorBoard would show."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    read = EventAccumulator(str(Path(run) / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    shown = {tag: read.Tensors(tag) for tag in read.Tags()["tensors"]}
    return {tag: [(event.step, make_ndarray(event.tensor_proto).item()) for event in shown[tag]] for tag in shown}


def expected_events() -> dict[str, list[tuple[int, Any]]]:
    series: dict[str, list[tuple[int, Any]]] = {}
    for step, values in measured():
        for name, value in values.items():
            series.setdefault(name, []).append((step, pytest.approx(value, rel=1e-7)))  # event files hold float32
    return series


def test_figures_are_the_finite_numbers_of_a_split():
    entry = {"step": 3, "split": "valid", "loss": 2.5, "targets": 7, "ppl": math.inf, "bpc": math.nan, "lr": None}
    entry |= {"unit": "word", "averaged": True, "each": [1]}
    assert figures(entry) == {"valid/loss": 2.5, "valid/targets": 7}


def test_tensorboard_gets_metrics_and_samples_and_hides_what_a_resumed_run_repeats(text):
    """Steps 4 to 6 run twice because the last checkpoint is lost; their seconds differ."""
    pytest.importorskip("tensorboard")
    assert train("--train.trackers", "tensorboard") == 0
    _forget_after_3()
    assert go_on("--train.max-steps", "8") == 0
    shown = events()
    samples = shown.pop("sample/text_summary")
    assert [step for step, _ in samples] == [4, 8] and samples[0][1].startswith(b"    ")
    assert shown == expected_events()
    assert {"train/loss", "train/bpc", "train/tokens_per_second", "valid/bpc", "test/bpc"} <= shown.keys()


def _forget_after_3() -> None:
    """Change the run as if it had been killed before its last checkpoint."""
    Path("runs/a/checkpoints/step_00000006").rename("runs/a/lost")


def test_a_service_gets_the_metrics_and_a_resumed_run_sends_nothing_twice(text, wandb):
    assert train("--train.trackers", "wandb") == 0
    before = wandb.figures()
    assert before == measured() and wandb.received[-1][1].keys() >= {"test/bpc"} and wandb.finished == 1
    _forget_after_3()
    assert go_on("--train.max-steps", "8") == 0
    first, second = wandb.inits
    json.dumps(first)
    assert (first["project"], first["resume"], first["name"]) == ("transformer-xl", "allow", "a")
    assert first["config"]["train"]["max_steps"] == 6 and first["config"]["model"]["vocab_size"] == 256
    assert first["id"] == second["id"] and len(first["id"]) >= 8
    assert wandb.figures()[len(before) :] == [sent for sent in measured() if sent[0] > 6]
    assert wandb.samples() == [4, 8]
    assert train("--out", "runs/b/a", "--train.trackers", "wandb") == 0
    assert wandb.inits[-1]["id"] != first["id"], "another run of the same name is another record"


def test_a_run_that_begins_again_is_a_new_record(text, wandb):
    for trackers in [open_trackers(Run(""), CONFIG) for _ in range(2)]:
        trackers.log({"split": "train", "step": 1, "loss": 2.0})
    assert wandb.inits[0]["id"] != wandb.inits[1]["id"] and len(wandb.received) == 2


def test_a_resumed_run_can_add_and_drop_a_tracker(text, wandb):
    assert train() == 0
    assert not wandb.inits
    assert go_on("--train.max-steps", "8", "--train.trackers", "wandb") == 0
    sent = wandb.figures()
    assert sent == measured()[-len(sent) :] and sent[0][0] > 6
    assert go_on("--train.max-steps", "9", "--train.trackers=") == 0
    assert wandb.figures() == sent


def test_a_failing_tracker_is_named_and_switched_off_and_training_continues(text, wandb, capsys):
    wandb.broken_from = 4
    assert train("--train.trackers", "wandb") == 0
    assert [entry["step"] for entry in Metrics("runs/a/metrics.jsonl").entries()] == [2, 3, 4, 4, 6, 6, 6]
    assert [step for step, _ in wandb.received] == [2, 3]
    warning = "wandb is switched off for the rest of this run because it failed: RuntimeError: no route to host"
    assert capsys.readouterr().out.splitlines().count(warning) == 1
    assert Path("runs/a/log.txt").read_text().splitlines().count(warning) == 1


class Spoiler:
    """A tracker that raises `error` at every call."""

    def __init__(self, error: BaseException):
        self.error = error

    def log(self, entry: Any) -> None:
        raise self.error

    def close(self) -> None:
        self.closed = True
        raise self.error


def test_a_failing_tracker_does_not_affect_others_and_a_keyboard_interrupt_passes():
    seen: list[Any] = []
    good = SimpleNamespace(log=seen.append, close=lambda: seen.append("closed"))
    warnings: list[str] = []
    with Trackers({"bad": (bad := Spoiler(OSError("full"))), "good": good}, warnings.append) as trackers:
        trackers.log({"step": 1})
        trackers.log({"step": 2})
    assert bad.closed and seen == [{"step": 1}, {"step": 2}, "closed"]
    assert warnings == ["bad is switched off for the rest of this run because it failed: OSError: full"]
    with pytest.raises(KeyboardInterrupt):
        Trackers({"bad": Spoiler(KeyboardInterrupt())}).log({"step": 1, "sample": "text"})


def test_a_tracker_that_cannot_start_is_reported_and_left_out(tmp_path, wandb, capsys):
    def refuse(**options: Any) -> None:
        raise RuntimeError("not logged in")

    wandb.init = refuse
    with open_trackers(Run(tmp_path), CONFIG) as trackers:
        trackers.log({"step": 1, "split": "train", "loss": 1.0})
    [warning] = capsys.readouterr().out.splitlines()
    assert "RuntimeError: not logged in" in warning
    assert not wandb.received


def test_the_users_environment_overrides_our_defaults(tmp_path, monkeypatch, wandb):
    def options() -> dict[str, Any]:
        with open_trackers(Run(tmp_path / "run"), CONFIG):
            return wandb.inits.pop()

    assert (options()["dir"], options()["name"]) == (str(tmp_path / "run"), "run")
    monkeypatch.setenv("WANDB_DIR", "elsewhere")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert (options()["dir"], options()["project"], options()["name"]) == ("elsewhere", "mine", "run")
    assert not wandb.inits, "a tracker named twice is one"


def test_missing_trackers_are_refused_together_before_a_run_folder_is_made(text, monkeypatch, capsys):
    for name in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    assert train("--train.trackers", "wandb", "tensorboard") == 2
    assert capsys.readouterr().err == (
        "txl: train.trackers must name trackers that are installed, got wandb, tensorboard. "
        "Run `pip install wandb tensorboard`, or leave it out (`--train.trackers=` names none).\n"
    )
    assert not Path("runs").exists()


def test_a_folder_named_like_a_tracker_is_not_its_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match="got wandb"):
        require_installed(("wandb",))
