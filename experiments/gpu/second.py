"""The second sitting: what is learned in minutes? 700 seconds, of which `--only 12l` takes 650.

    python3 -m experiments.gpu.second --out OUT

`enwik8-fast` as it is, whose score on a CPU is known, and `enwik8-12l-modern` in nine minutes.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from .sitting import Sitting, contract, machine
from .training import Training

S = Sitting.from_command_line(700)
TXL = "-m", "transformer_xl"
RUNS = Path("runs/gpu")
DEVICE = "--train.device", str(S.device), "--train.save-every", "0", "--train.keep", "1"
DEVICE += ("--train.backend", "triton") * S.cuda  # refused if the kernels cannot serve, so no other is measured
TOY = ("--data", "experiments/LOG.md", "--model.vocab-size", "0", "--train.max-steps", "10", "--train.tgt-len", "16")
TOY += ("--train.mem-len", "16", "--train.batch-size", "4", "--train.warmup-steps", "2", "--train.eval-every", "0")
SMALL = ("--model.n-layer", "1", "--model.d-model", "16", "--model.n-head", "2", "--model.d-head", "8")
SMALL += ("--model.d-inner", "16", "--eval.tgt-len", "16", "--eval.mem-len", "32", "--eval.attn-len", "32")
CPU_BPC = 1.521
"""The score of `enwik8-fast` on a CPU: the first 1,000,000 symbols of the test split."""
ROWS = 128
NINE_MINUTES, ENDING = 540, 60
"""Seconds of the whole command, and those in which it does not train: it starts, compiles again, scores."""


def train(recipe: str, *options: str, seconds: float) -> dict[str, Any]:
    """Run `txl train`; the score, the time and the curve. Its log, settings and page go to the results."""
    run = RUNS / recipe
    shutil.rmtree(run, ignore_errors=True)
    words = [*TXL, "train", recipe, *DEVICE, "--out", str(run), *options]
    try:
        S.run(*words, log=f"{recipe}.log", seconds=seconds)
    finally:
        for name in ("metrics.jsonl", "report.html"):
            if (run / name).exists():
                shutil.copyfile(run / name, S.out / f"{recipe}-{name}")
    return {"options": list(options), "lines": [json.loads(line) for line in metrics(run)[-3:]]}


def metrics(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()


S.part("machine", 5)(lambda: machine(S))


@S.part("enwik8", 5)
def _() -> str:
    source = Path(os.environ.get("TXL_CARRIED", "."), "enwik8.xz")
    return "" if S.toy else S.run(*TXL, "data", "enwik8", "--source", str(source), log="data.log", seconds=60)


S.part("the contract", 20)(lambda: contract(S))


@S.part("enwik8-fast", 100)
def _() -> dict[str, Any]:
    return {"on a CPU": CPU_BPC} | train("enwik8-fast", "--train.seed", "31", *TOY * S.toy, seconds=min(S.left, 170))


@S.part("enwik8-12l-modern", 60)
def _() -> dict[str, Any]:
    """Nine minutes for the command, after 20 measured steps, which leave compiled code in PyTorch's cache.

    No dropout, below three epochs; the rate ends at 0.
    """
    trial = Training(S, "enwik8-12l-modern", ROWS, dropout=False, compile=True)
    milliseconds = trial.times(profile=False)["ms"]
    steps = int(0.95e3 * (min(NINE_MINUTES, S.left) - ENDING) / milliseconds)
    del trial
    plan = "--train.batch-size", str(ROWS), "--train.max-steps", str(steps), "--train.warmup-steps", str(steps // 20)
    plan += "--train.lr", "4e-3", "--model.dropout", "0", "--train.eval-every", "0", "--train.log-every", "50"
    plan += "--train.eval-tokens", "500000", "--train.compile"
    score = "--eval.tgt-len", "512", "--eval.mem-len", "2100", "--eval.attn-len", "2100", "--eval.batch-size", "32"
    found = train("enwik8-12l-modern", *plan, *score, *TOY * S.toy, *SMALL * S.toy, seconds=S.left)
    return {"ms a step": milliseconds, "tokens": steps * ROWS * 512} | found


S.finish()
