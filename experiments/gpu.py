"""Run on a GPU what a first GPU has to show, in parts of at most nine minutes.

    make gpu                                                     # all parts that have not passed yet
    python -m experiments.gpu --only kernels op                  # these parts, again if they have passed
    python -m experiments.gpu --device cpu --seconds 60          # what there is to run, without a GPU

Each part has a log, OUT/PART.log. A line of OUT/results.jsonl has the part's exit status, seconds, hardware and commit.
A training run that its time ends is saved, and a later call goes on with it. ptb-24m and enwik8-12l need `txl data ptb`
and `txl data enwik8` before.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from benchmarks.options import hardware

ROOT = Path(__file__).parents[1]
TRAIN = "-m transformer_xl train"
SHORT = "text-small --data {root}/experiments/LOG.md --train.max-steps 60 --train.log-every 20 --train.precision fp32"
PARTS = {
    "environment": "-m transformer_xl env",
    "kernels": "-m pytest -q -n 0 tests/ops/test_triton.py",
    "contract": "-m pytest -q -n 0 tests/ops/test_ops.py",
    "step": "-m pytest -q -n 0 tests/model/test_step.py",
    "alone": f"{TRAIN} {SHORT} --train.device {{device}} --out {{out}}/alone",
    "ddp": f"-m torch.distributed.run --standalone {TRAIN} {SHORT} --train.device {{device}} --out {{out}}/ddp",
    "fsdp": f"-m torch.distributed.run --standalone {TRAIN} {SHORT} --train.device {{device}} --out {{out}}/fsdp "
    "--train.parallel fsdp",
    "equal": "-m experiments.gpu --out {out} --equal",
    **{part: f"-m benchmarks {part} --device {{device}} --repeats 3" for part in ("op", "train", "eval", "decode")},
    "sliding": "-m benchmarks sliding --device {device} --repeats 1",
    "memory": "-m benchmarks memory --device {device}",
    "ptb-24m": f"{TRAIN} ptb-24m --train.device {{device}} --out {{out}}/ptb-24m --resume auto",
    "enwik8-12l": f"{TRAIN} enwik8-12l --train.device {{device}} --out {{out}}/enwik8-12l --resume auto",
}
"""Arguments of Python."""
RANKS = ("alone", "ddp", "fsdp")
"""Short runs that must have the same losses."""
ENDLESS = ("ptb-24m", "enwik8-12l")
"""Parts whose end by time is no failure."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts. The exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=520.0, help="the most for a part")
    parser.add_argument("--equal", action="store_true", help=f"only compare the losses of {', '.join(RANKS)} in --out")
    options = parser.parse_args(words)
    if options.equal:
        return 0 if losses_agree([options.out / name for name in RANKS]) else 1
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    lines = map(json.loads, results.read_text().splitlines() if results.exists() else ())
    passed = {line["part"] for line in lines if line["status"] == 0 and line["commit"] == commit()}
    failed = []
    for part in options.only or [part for part in PARTS if part not in passed]:
        print(f"{part} ...", flush=True)
        status, seconds = run(part, options.out, options.device, options.seconds)
        print(f"{part}: {'passed' if status == 0 else f'failed, see {part}.log'}, {seconds:.0f} s", flush=True)
        line = {"part": part, "status": status, "seconds": round(seconds, 1), "date": date.today().isoformat()}
        with results.open("a") as file:
            file.write(json.dumps(line | {"commit": commit(), "hardware": hardware(options.device)}) + "\n")
        failed += [part] * (status != 0)
    if failed:
        print(f"Failed: {', '.join(failed)}.")
    return int(bool(failed))


def run(part: str, out: Path, device: str, seconds: float) -> tuple[int, float]:
    """The exit status of a part, 0 also for a training run that its time ended, and its seconds."""
    if part in RANKS:
        shutil.rmtree(out / part, ignore_errors=True)
    command = [sys.executable, *shlex.split(PARTS[part].format(root=ROOT, out=out.resolve(), device=device))]
    started = time.monotonic()
    with (out / f"{part}.log").open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # a training run saves a checkpoint
            try:
                status = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            status = 0 if part in ENDLESS and status >= 0 else status or 1
    return status, time.monotonic() - started


def losses_agree(runs: Sequence[Path]) -> bool:
    """Whether the training losses of all runs agree to 1e-4 of their size."""
    curves = []
    for folder in runs:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        curves.append([line["loss"] for line in lines if line.get("split") == "train"])
        print(f"{folder.name}: {curves[-1]}")
    steps = list(zip(*curves, strict=True))
    return bool(steps) and all(max(losses) - min(losses) <= 1e-4 * min(losses) for losses in steps)


def commit() -> str:
    """The commit of this checkout, or "" without git."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
