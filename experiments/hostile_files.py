"""Hostile files: what a command takes, in memory and seconds, before it refuses or reads them.

    python -m experiments.hostile_files --uses 60

Each use is drawn with a seed and is one command in a process of its own. It must end with status 0, or with 2 and a
sentence, below 1.5 GB, and write neither a traceback nor what a terminal obeys.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from .serve_load import random_run

Dice = random.Random
Words = list[str]


@dataclass
class Options:
    """Give hostile files to commands."""

    uses: int = 60
    seed: int = 0


def packed_bomb(dice: Dice, folder: Path, _: Path) -> Words:
    """Gigabytes in a small file."""
    opener, name = dice.choice([(gzip.open, "a.txt.gz"), (lzma.open, "a.txt.xz"), (gzip.open, "a.jsonl.gz")])
    with opener(folder / name, "wb") as file:
        file.write(b'"')
        for _ in range(dice.choice([300, 1200])):
            file.write(dice.choice([b"a", b" a\n", bytes(1)]) * (1 << 18) * 4)
    return train(folder / name, dice)


def archive_bomb(dice: Dice, folder: Path, _: Path) -> Words:
    """Many files, large files, or names that no folder can hold."""
    names = dice.choice(
        [[str(i) for i in range(50_000)], ["a", "a/b.txt"], ["n" * 300], ["../x", "/etc/x"], ["a\x1b[31m.txt"]]
    )
    content = b"text " * dice.choice([1, 100])
    if dice.random() < 0.5:
        with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as made:
            for name in names:
                made.writestr(name, content)
        return train(folder / "a.zip", dice)
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    return train(folder / "a.tar", dice)


def odd_text(dice: Dice, folder: Path, _: Path) -> Words:
    """Text in which byte pairs find no border, of one word, or of zeros."""
    one = dice.choice(["\u4e2d\u6587\u7684", "ACGT", "aGVsbG8", "\0"])
    (folder / "a.txt").write_text(one * ((dice.choice([4, 12]) << 20) // len(one.encode())), encoding="utf-8")
    return train(folder / "a.txt", dice, unit=dice.choice(["bpe", "bpe", "word", "char"]))


def changing_text(dice: Dice, folder: Path, _: Path) -> Words:
    """A text that grows, shrinks or changes while it is read."""
    file = folder / "a.txt"
    file.write_bytes(b"some text of words\n" * 1_000_000)

    def change() -> None:
        time.sleep(dice.uniform(2.5, 4))
        with file.open("r+b") as opened:
            opened.seek(dice.choice([0, 2]), dice.choice([0, 2]))
            opened.write(b"other " * dice.choice([1, 1_000_000]))
            if dice.random() < 0.3:
                opened.truncate(1000)

    threading.Thread(target=change, daemon=True).start()
    return train(file, dice)


def absurd_sizes(dice: Dice, folder: Path, run: Path) -> Words:
    """A checkpoint whose config.json asks for more than the machine has."""
    copy = copied(run, folder)
    name = dice.choice(
        ["n_layer", "d_model", "d_embed", "d_inner", "n_head", "d_head", "ngram_rows", "vocab_size", "positions"]
    )
    content = json.loads((copy / "config.json").read_text())
    content["model"][name] = dice.choice([10**6, 2**27, 2**31, -1, 10**30])
    if dice.random() < 0.3:
        content["model"]["zero_memory"], content["eval"]["mem_len"] = True, 10**9
    (copy / "config.json").write_text(json.dumps(content))
    return ["generate", str(copy), "--max-tokens", "1"]


def odd_run(dice: Dice, folder: Path, run: Path) -> Words:
    """Files of a run with odd contents and names."""
    copy = copied(run, folder / dice.choice(["run", "a\x1b[31mb", "two\nlines"]))
    odd = dice.choice(
        [
            "[" * 100_000,
            "[1]",
            "{",
            '{"step": "x"}',
            '{"step": 1e999}',
            "\0",
            "9" * 9999,
            '{"corpus": [1], "devices": {}}',
        ]
    )
    for name in dice.sample(
        ["metrics.jsonl", "environment.json", "report.json", "config.toml", "config.json", "vocab.json"], 2
    ):
        (copy / name).write_text(odd)
    return [dice.choice(["report", "generate", "eval"]), str(copy)]


KINDS: list[Callable[[Dice, Path, Path], Words]] = [
    packed_bomb, archive_bomb, odd_text, changing_text, absurd_sizes, odd_run
]  # fmt: skip


def train(file: Path, dice: Dice, unit: str = "") -> Words:
    steps = ["--train.max-steps", "1", "--train.batch-size", "1", "--out", str(file.parent / "out"), "--no-report"]
    unit = unit or dice.choice(["byte", "char", "word", "bpe"])
    return ["train", "text-small", "--data", str(file), "--corpus.unit", unit, *steps]


def copied(run: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file in run.iterdir():
        if file.name != "SHA256SUMS":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def attack(kind: Callable[[Dice, Path, Path], Words], dice: Dice, run: Path) -> tuple[int, float, float, str]:
    """Status, megabytes, seconds, and what is wrong with the output."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words, began = kind(dice, folder, run), time.monotonic()
        with (folder / "log").open("wb") as log:
            environment = os.environ | {"TXL_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "transformer_xl", *words]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
            _, status, usage = os.wait4(process.pid, 0)
        text, code = (folder / "log").read_text(errors="replace"), os.waitstatus_to_exitcode(status)
        faults = [what for what in ("Traceback", "\x1b") if what in text]
        if faults or code not in (0, 2):
            faults += [" ".join(words)[:300], text[-1500:]]
        return code, usage.ru_maxrss / 1024, time.monotonic() - began, "\n".join(faults)


def main() -> None:
    options = tyro.cli(Options)
    worst: dict[str, list[tuple[float, float]]] = {kind.__name__: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        run = random_run(Path(name))
        for number in range(options.uses):
            kind = KINDS[number % len(KINDS)]
            code, megabytes, seconds, faults = attack(kind, Dice(f"{options.seed} {number}"), run)
            worst[kind.__name__].append((megabytes, seconds))
            if faults or megabytes > 1500:
                print(
                    f"use {number}, {kind.__name__}: status {code}, {megabytes:.0f} MB, {seconds:.0f} s {faults}",
                    flush=True,
                )
    for kind_name, found in worst.items():
        megabytes, seconds = map(max, zip(*found, strict=True))
        print(f"{kind_name:14} {len(found)} uses: at most {megabytes:,.0f} MB, {seconds:.0f} s")


if __name__ == "__main__":
    main()
