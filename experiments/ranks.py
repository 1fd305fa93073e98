"""Check that several ranks train like one: 1, 2 and 4 ranks with DDP and FSDP2, changed ranks, and a killed rank.

    python -m experiments.ranks [--runs DIR]

Each run takes 50 steps with gloo on this machine, without dropout. The text is enwik8, or WikiText-2 for the adaptive
softmax. The script compares the training losses at steps 10 to 50 and the validation loss at the end. It prints a
table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECIPE = """
[model]
vocab_size = 0
n_layer = 4
n_head = 4
d_head = 16
d_model = 64
d_inner = 256
{model}
[corpus]
name = "{corpus}"
unit = "{unit}"
newlines = "{newlines}"
[train]
tgt_len = 32
mem_len = 32
batch_size = 8
max_steps = 50
schedule = "constant"
lr = 0.002
log_every = 10
eval_every = 0
eval_tokens = 4000
save_every = 10
device = "cpu"
[eval]
max_tokens = 4000
"""
TEXTS = {
    "plain": {"corpus": "enwik8", "unit": "byte", "newlines": "drop", "model": ""},
    "adaptive": {
        "corpus": "wikitext-2",
        "unit": "word",
        "newlines": "keep",
        "model": "cutoffs = [2000, 10000]\ndiv_val = 2\ntie_projs = [false, true, true]",
    },
}
KILL = """
import os, signal, sys
from transformer_xl import train
from transformer_xl.commands.main import main

if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    advance = train.Trainer.advance
    def dying(trainer):
        if trainer.step == 34:
            os.kill(os.getpid(), signal.SIGKILL)
        return advance(trainer)
    train.Trainer.advance = dying
sys.exit(main(sys.argv[1:]))
"""


def run(folder: Path, text: str, ranks: int, *more: str, resume: bool = False, kill: bool = False) -> None:
    """Train in `folder` on this many ranks."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    recipe = folder.parent / f"{text}.toml"
    recipe.write_text(RECIPE.format(**TEXTS[text]), encoding="utf-8")
    program = ["-m", "transformer_xl"]
    if kill:
        (folder.parent / "kill.py").write_text(KILL, encoding="utf-8")
        program = [str(folder.parent / "kill.py")]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1"]
    words = ["train", str(recipe), "--out", str(folder), *more, *(["--resume"] if resume else [])]
    command = [sys.executable, *(launcher if ranks > 1 else []), *program, *words]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def losses(folder: Path) -> dict[str, float]:
    """Each logged loss by split and step. A repeated step is an error."""
    found: dict[str, float] = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        key = f"{entry['split']} {entry['step']}"
        assert key not in found, f"{folder} has {key} twice"
        found[key] = entry["loss"]
    return found


def difference(folder: Path, alone: Path) -> float:
    """The largest relative difference of the logged losses."""
    a, b = losses(folder), losses(alone)
    assert a.keys() == b.keys(), f"{folder} logged {sorted(a)}, and {alone} {sorted(b)}"
    return max(abs(a[key] - b[key]) / b[key] for key in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/ranks"), help="where the run folders go, anew")
    given = parser.parse_args()
    shutil.rmtree(given.runs, ignore_errors=True)
    rows = []
    for text, precision in product(TEXTS, ("fp32", "bf16")):
        home = given.runs / f"{text}-{precision}"
        settings = ("--train.precision", precision)
        run(home / "alone", text, 1, *settings)
        final = losses(home / "alone")["train 50"]
        for ranks, parallel in product((2, 4), ("ddp", "fsdp")):
            folder = home / f"{parallel}-{ranks}"
            run(folder, text, ranks, *settings, "--train.parallel", parallel)
            rows.append([text, precision, f"{ranks} ranks, {parallel}", final, difference(folder, home / "alone")])
            print(rows[-1], flush=True)
    alone, folder = (given.runs / "plain-fp32" / name for name in ("alone", "ddp-2-compiled"))
    run(folder, "plain", 2, "--train.precision", "fp32", "--train.compile", "true")
    final = losses(alone)["train 50"]
    rows.append(["plain", "fp32", "2 ranks, ddp, compiled", final, difference(folder, alone)])
    print(rows[-1], flush=True)
    for text, parallel in product(TEXTS, ("ddp", "fsdp")):
        alone = given.runs / f"{text}-fp32" / "alone"
        final = losses(alone)["train 50"]
        settings = ("--train.precision", "fp32", "--train.parallel", parallel)
        folder = given.runs / f"{text}-fp32" / f"{parallel}-4-1-2"
        run(folder, text, 4, *settings, "--train.max-steps", "20")
        run(folder, text, 1, "--train.max-steps", "40", resume=True)
        run(folder, text, 2, "--train.max-steps", "50", resume=True)
        moved = {key: loss for key, loss in losses(folder).items() if not key.startswith(("valid", "test"))}
        whole = losses(alone)
        worst = max(abs(loss - whole[key]) / whole[key] for key, loss in moved.items())
        rows.append([text, "fp32", f"4, then 1, then 2 ranks, {parallel}", final, worst])
        folder = given.runs / f"{text}-fp32" / f"{parallel}-killed"
        run(folder, text, 2, *settings, kill=True)
        rows.append([text, "fp32", f"2 ranks, {parallel}, one killed at step 34", final, difference(folder, alone)])
        print(*rows[-2:], sep="\n", flush=True)
    print("| text | precision | ranks | loss at step 50, one rank | largest relative difference of a loss |")
    print("|---|---|---|---:|---:|")
    for text, precision, ranks, final, worst in rows:
        print(f"| {text} | {precision} | {ranks} | {final:.4f} | {worst:.1e} |")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
