"""Several ranks give the same training as one, and any number of ranks can resume from a checkpoint.

The ranks run tests/ranks.py on gloo; this process computes the same results alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from shlex import split as words

import pytest
import torch
import torch.distributed as dist
from amount import ALL
from filelock import FileLock
from ranks import ALONE, CASES, NOT_SHARDED, calls, findings, half_precision, scored, trainer_of
from safetensors.torch import load_file
from small_models import small_model
from tiny_runs import TINY, without_clock
from torch import Tensor

from transformer_xl.commands.main import main
from transformer_xl.config.settings import RunConfig, TrainConfig
from transformer_xl.data.corpus import Corpus
from transformer_xl.data.datasets import open_corpus
from transformer_xl.mistake import Mistake
from transformer_xl.run.checkpoint import TrainingState, save_checkpoint
from transformer_xl.run.folder import Run
from transformer_xl.runtime.ranks import Ranks, _wait_for_gloo
from transformer_xl.train import agreement
from transformer_xl.train.agreement import check_alike, check_folder

TESTS = Path(__file__).parents[1]
FORKS = str(TESTS / "forked_ranks.py")
PARALLEL = ("ddp", "fsdp")
pytestmark = pytest.mark.timeout(400)


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node=2"


def launch(*command: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | environment
    return subprocess.run(
        [sys.executable, *command],
        env=variables,
        text=True,
        capture_output=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of this number of ranks, computed once for all workers of this test run."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent

    @cache
    def of(ranks: int, parallel: str) -> dict[str, dict[str, Tensor]]:
        with FileLock(shared / f"ranks-{ranks}.lock"):
            if not (shared / f"fsdp-{ranks}").exists():
                done = launch(FORKS, str(ranks), "0", str(TESTS / "ranks.py"), str(shared))
                assert done.returncode == 0, done.stderr[-3000:]
                assert "find_unused_parameters" not in done.stderr, done.stderr[-3000:]
        cases: dict[str, dict[str, Tensor]] = {}
        for name, value in load_file(shared / f"{parallel}-{ranks}").items():
            case, rest = name.split("|")
            cases.setdefault(case, {})[rest] = value
        return cases

    return of


assert_same = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10)


ROWS = [(2, parallel, case) for parallel in PARALLEL for case in CASES if parallel == "ddp" or case not in NOT_SHARDED]
FOUR = [(4, parallel, case) for parallel in PARALLEL for case in ("bands", "chunks")]


@pytest.mark.parametrize(
    ("ranks", "parallel", "case"), [*ROWS, *(pytest.param(*row, marks=pytest.mark.outside) for row in FOUR)]
)
def test_several_ranks_equal_one(found, ranks, parallel, case):
    """Losses, gradient norms, weights and memories in float64 differ only by the order of sums."""
    # Muon multiplies in bfloat16, whose rounding depends on the last bit of its input.
    tolerance = {"rtol": 0.02, "atol": 2e-3} if case == "muon" else {}
    assert_same(findings(trainer_of(case, ALONE)), found(ranks, parallel)[case], **tolerance)


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_differs_by_its_rounding(found, parallel, precision):
    alone = findings(half_precision(precision, ALONE))["nats, targets, norm"]
    torch.testing.assert_close(found(2, parallel)[precision]["nats, targets, norm"], alone, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_the_models_own_calls_give_the_same(found, parallel):
    assert_same(calls(trainer_of("bands", ALONE)), found(2, parallel)["calls"])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.outside)])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_every_target_is_scored_once_by_any_number_of_ranks(found, ranks, parallel):
    """Also where there are more ranks than streams."""
    for rows, got in found(ranks, parallel)["scored"].items():
        alone = scored(trainer_of("bands", ALONE), int(rows))
        assert got[1] == alone[1] == 100
        torch.testing.assert_close(got, alone)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.outside)])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_checkpoint_of_several_ranks_resumes_with_one(found, ranks, parallel):
    several = found(ranks, parallel)
    stored = {k.removeprefix("weight."): v for k, v in several["documents"].items() if k.startswith("weight.")}
    scalars = {"seconds": 0.0, "skipped": 0, "pace": {}}
    trainer = trainer_of("bands", ALONE, documents=True, stored=stored)
    trainer.restore(TrainingState(3, scalars, several["state"]))
    assert_same(findings(trainer, 3), several["resumed elsewhere"])


@pytest.mark.parametrize("parallel", PARALLEL)
def test_equally_many_ranks_resume_with_the_same_bits_and_dropout(found, parallel):
    cases = found(2, parallel)
    assert_same(cases["undisturbed"], cases["resumed"], rtol=0, atol=0)
    assert not torch.equal(
        cases["undisturbed"]["nats, targets, norm"], cases["resumed elsewhere"]["nats, targets, norm"]
    )


@pytest.mark.parametrize("parallel", PARALLEL)
def test_each_rank_reports_what_is_not_finite(found, parallel):
    assert found(2, parallel)["diagnosis"]["told"] == 2


@pytest.mark.parametrize(("count", "size"), [(8, 2), (10, 4), (3, 4), (0, 2)])
def test_ranks_get_all_rows_in_order(count, size):
    shares = [range(count)[Ranks(rank, size).rows(count)] for rank in range(size)]
    assert [row for share in shares for row in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


SETTINGS = words(
    "--model.n-layer 2 --model.dropout 0 --train.optimizer adam --train.batch-size 4 --train.max-steps 16"
    " --train.log-every 4 --train.eval-every 8 --train.save-every 4 --train.sample-every 8 --train.sample-tokens 5"
    " --train.lr 0.01 --train.backend strided --train.precision fp32 --train.device cpu --eval.batch-size 3"
)
KILL = """
import json, os, sys
from transformer_xl.commands.main import main
from transformer_xl.train.step import Trainer

attempt, ends = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), json.loads(os.environ["ENDS"])
if os.environ["RANK"] == "1" and attempt < len(ends):
    advance = Trainer.advance
    at, sent = ends[attempt]
    def dying(trainer, *signals):
        if trainer.step == at:
            os.kill(os.getpid(), sent)
        return advance(trainer, *signals)
    Trainer.advance = dying
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "kill.py").write_text(KILL)
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 60)
    return folder


def train(home: Path, out: str, *more: str) -> list[str]:
    return ["train", "text-small", "--data", f"{home}/text.txt", "--out", f"{home}/{out}", *TINY, *SETTINGS, *more]


def assert_same_figures(home: Path, several: str) -> None:
    """A run on several ranks logged what the same run logs in one process."""
    if not (home / "alone").exists():
        assert main(train(home, "alone")) == 0
    two, one = ([e for e in without_clock(home / name) if "split" in e] for name in (several, "alone"))
    assert [(e["step"], e["split"]) for e in two] == [(e["step"], e["split"]) for e in one]
    for a, b in zip(two, one, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a.get("targets") == b.get("targets")


def test_after_a_killed_rank_and_a_signal_to_one_the_run_ends_with_the_same_figures(home, tmp_path):
    """Killed before the first checkpoint (in test-all), stopped, so that all ranks save, and killed after one."""
    ends = [(2, signal.SIGKILL)] * ALL + [(10, signal.SIGTERM), (13, signal.SIGKILL)]
    line = train(home, "killed", "--train.parallel", "fsdp")
    ranks = [FORKS, "2", str(len(ends)), str(home / "kill.py")]
    done = launch(*ranks, *line, TXL_HOME=str(tmp_path), ENDS=json.dumps(ends))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0: Another rank has ended" in done.stderr and "exitcode: 75" in done.stderr
    assert done.stdout.count("Stopped by a signal, and saved.") == 1
    assert_same_figures(home, "killed")
    log = (home / "killed" / "log.txt").read_text()
    assert log.count("2 ranks by fsdp") == 1 + len(ends) and log.count("sample:") == 2
    assert all(f"Resumed from step {step} of 16 (step_{step:08d})." in log for step in (11, 12))


class Two:
    """The first of two ranks; `theirs` are the other one's tensors, None: the same."""

    def __init__(self, theirs: list[Tensor] | None = None):
        self.own: list[Tensor] = []
        self.theirs = theirs

    def gather(self, tensor: Tensor) -> list[Tensor]:
        self.own.append(tensor)
        return [tensor, tensor if self.theirs is None else self.theirs[len(self.own) - 1]]


@pytest.mark.unchecked
def test_ranks_with_other_settings_texts_or_checkpoints_are_refused(tmp_path):
    def corpus(text: str) -> Corpus:
        (tmp_path / text[0]).write_text(text * 99)
        return open_corpus(tmp_path / text[0])

    saved, model = tmp_path / "run" / "checkpoints" / "step_00000003", small_model(vocab_size=256)
    save_checkpoint(saved, model=model, vocab=corpus("a b").vocab, config=RunConfig(), step=3)
    ours = (RunConfig(), corpus("a b"), Run(tmp_path / "new"))
    rounding = replace(ours[0], train=TrainConfig(backend="strided", device="cuda"))
    others = {
        "": (rounding, *ours[1:]),
        "settings": (replace(ours[0], train=TrainConfig(lr=0.5)), *ours[1:]),
        "texts": (ours[0], corpus("c d"), ours[2]),
        "checkpoints": (*ours[:2], Run(tmp_path / "run")),
    }
    for what, theirs in others.items():
        check_alike(*theirs, there := Two())
        with pytest.raises(Mistake, match=f"All ranks must have the same {what}") if what else nullcontext():
            check_alike(*ours, Two(there.own))


@pytest.mark.unchecked
def test_a_rank_without_the_runs_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "SHARED_SECONDS", 0)
    (tmp_path / "environment.json").write_text("{}")
    check_folder(Run(tmp_path), first := Two())
    monkeypatch.setattr(Ranks, "gather", lambda _, __: first.own)
    check_folder(Run(tmp_path), Ranks(1, 2))
    with pytest.raises(Mistake, match="must be one folder for all ranks, and rank 1 has another"):
        check_folder(Run(tmp_path / "none"), Ranks(1, 2))


@pytest.mark.outside
def test_the_end_waits_only_for_gloo():
    """A name that keeps a sum would make it wait to the limit, five seconds."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    started = time.monotonic()
    _wait_for_gloo()
    assert time.monotonic() - started < 4
    dist.destroy_process_group()


def test_a_rank_may_prepare_for_longer_than_a_sum_may_take(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from datetime import timedelta\n"
        "from transformer_xl.runtime import ranks\n"
        "ranks.LONGEST_SUM = timedelta(seconds=2)\n"
        "with ranks.join_ranks('cpu') as joined:\n"
        "    for wait in (joined.wait_for_first, joined.wait):\n"
        "        time.sleep(4 * joined.first)\n"
        "        wait()\n"
        "        print(wait.__name__ + ' ', end='', flush=True)\n"  # one write, which the other rank's cannot split
    )
    done = launch(*words(TORCHRUN), str(script))
    assert done.returncode != 0 and done.stdout.split() == ["wait_for_first"] * 2


@pytest.mark.outside
def test_compiled_ranks_train_like_one_process(home, tmp_path):
    line = train(home, "compiled", "--train.compile")
    done = launch(*words(TORCHRUN), "-m", "transformer_xl", *line, timeout=900, TXL_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_figures(home, "compiled")
