"""Read a log of any length line by line in constant memory, and flag the lines that surprise the model.

$ python examples/log_stream.py
...
After 100 lines this process has 612 MB
 7.71 bits per byte: 00:16:12 GET /../../etc/passwd 200 0 ms user=anonymous
 7.84 bits per byte: 00:18:11 ERROR db: deadlock, transaction rolled back
...
After 2,000 lines this process has 613 MB
Flagged 24 lines; 23 of them are among the 23 planted ones

With a file, or with - for standard input, the model learns its first lines and watches the others:
python examples/log_stream.py server.log --train-lines 5000
"""

import fileinput
import random
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import tyro

from transformer_xl import LanguageModel, TransformerXL, fit, load_model, load_recipe, open_corpus, resolve_settings

SMALL = ["--model.n-layer=2", "--model.n-head=2", "--model.d-model=128", "--model.d-inner=256"]
SMALL += ["--train.tgt-len=96", "--train.mem-len=96", "--train.batch-size=8", "--eval.mem-len=256"]
PLANTED = (
    "ERROR disk sda1: I/O error, sector 48213377",
    "WARN auth: 41 failed logins for root from 203.0.113.9",
    "ERROR db: deadlock, transaction rolled back",
    "FATAL worker 3: out of memory, killed by the kernel",
    "GET /../../etc/passwd 200 0 ms user=anonymous",
    "INFO cache: evicted -1 of 0 entries in 97114 ms",
    "GET /cart 200 9431 ms user=b",
    "GET /cart 500 12 ms user=e",
)
FAR = 5.0
"""A line is flagged above this many standard deviations over the mean of the bits per byte of earlier lines."""


def made_up_log(lines: int, first_planted: int) -> Iterator[str]:
    """A web server's log. From line `first_planted` on, about one line in 80 is one of `PLANTED`."""
    draw, now = random.Random(1), datetime(2026, 1, 1)
    for number in range(lines):
        now += timedelta(milliseconds=draw.randint(1, 900))
        page, user = draw.choice(("/", "/cart", "/login", f"/item/{draw.randint(1, 99)}")), draw.choice("abcdef")
        usual = (
            f"GET {page} 200 {draw.randint(2, 40)} ms user={user}",
            f"POST {page} 302 {draw.randint(9, 90)} ms user={user}",
            f"INFO cache: evicted {draw.randint(1, 30)} of 4096 entries in {draw.randint(1, 9)} ms",
            f"INFO db: committed transaction {80000 + number}",
        )
        planted = number >= first_planted and draw.random() < 1 / 80
        text = draw.choice(PLANTED) if planted else draw.choices(usual, (8, 3, 1, 2))[0]
        yield f"{now:%H:%M:%S} {text}\n"


def read(log: str) -> Iterator[str]:
    """The lines of a file, or of standard input for -."""
    if log == "-":
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    with fileinput.input(log, encoding="utf-8", errors="replace") as lines:
        yield from lines


def trained(lines: Iterable[str], steps: int) -> LanguageModel:
    """A small model of the bytes of these lines."""
    with TemporaryDirectory() as folder:
        Path(folder, "log.txt").write_text("".join(lines), encoding="utf-8")
        config = load_recipe("text-fast", [*SMALL, f"--train.max-steps={steps}"], data=Path(folder, "log.txt"))
        corpus = open_corpus(config.corpus)
        config = resolve_settings(config, corpus)
        torch.manual_seed(config.train.seed)
        fit(TransformerXL(config.model), corpus, config, Path(folder, "run"))
        return load_model(Path(folder, "run"))


def surprising(model: LanguageModel, lines: Iterable[str]) -> Iterator[tuple[str, float, bool]]:
    """Each line, its bits per byte, and whether they are `FAR` from the running average of the lines before it."""
    context, mean, variance = None, 0.0, 0.0
    for number, line in enumerate(lines):
        scored = model.score(line, context)
        bits, rate = scored.bits_per_byte, max(1 / (number + 1), 0.01)
        strange = number >= 50 and bits > mean + FAR * variance**0.5
        if not strange:  # the model forgets a strange line, so a second one surprises it as much
            context, off = scored.context, bits - mean
            mean, variance = mean + rate * off, (1 - rate) * (variance + rate * off * off)
        yield line, bits, strange


def resident_mb() -> float:
    """This process's memory in MB; 0 on a system without /proc."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * 4096 / 1e6 if file.exists() else 0.0


def main(log: tyro.conf.Positional[str] = "", steps: int = 150, train_lines: int = 2000) -> None:
    """Learn the first lines of LOG (default: a log that is made up), and watch the others."""
    if steps < 1:
        sys.exit(f"--steps must be at least 1, got {steps}.")
    if log not in ("", "-") and (not Path(log).exists() or Path(log).is_dir()):
        sys.exit(f"LOG must be a file or a pipe, or - for standard input, got {log}.")
    lines = read(log) if log else made_up_log(2 * train_lines, first_planted=train_lines + 100)
    first = list(islice(lines, max(train_lines, 0)))
    if not 0 < train_lines <= len(first):
        sys.exit(f"LOG must have more than --train-lines lines, at least one, got {len(first):,} and {train_lines:,}.")
    model = trained(first, steps)
    flagged: list[bool] = []
    planted = count = 0
    for line, bits, strange in surprising(model, lines):
        count, known = count + 1, line[9:].strip() in PLANTED
        planted += known
        if strange:
            flagged.append(known)
            print(f"{bits:5.2f} bits per byte: {line.strip()}")
        if count == 100:
            print(f"After {count:,} lines this process has {resident_mb():.0f} MB")
    if not count:
        sys.exit(f"LOG must have more than --train-lines = {train_lines:,} lines, and has no line to watch.")
    print(f"After {count:,} lines this process has {resident_mb():.0f} MB")
    if not log:
        print(f"Flagged {len(flagged)} lines; {sum(flagged)} of them are among the {planted} planted ones")


if __name__ == "__main__":
    tyro.cli(main)
