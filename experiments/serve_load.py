"""Load `txl serve` with clients, and print how it holds: tokens a second, waiting times, memory, a long session.

    python -m experiments.serve_load              # `enwik8-small` with random weights, half a minute for each load
    python -m experiments.serve_load --run runs/my --minutes 10
    python -m experiments.serve_load --clients --session 0 --texts 0 --generate 1 16     # only transformers

Each client sends one request after another, streamed: a new text, or, every other time, more of its last text. A mixed
batch of 200 texts must also have the bits of the same texts alone. The slope of the memory is that of a straight line
through the resident sizes of the second half, with its standard error. The line goes through the means of ten blocks,
because sizes half a second apart are nearly the same and would make the error too small.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import torch
import tyro

from transformer_xl import TransformerXL, save_checkpoint
from transformer_xl.config.recipe import load_recipe
from transformer_xl.data.vocab import Vocab

STORE = 100
"""Megabytes of texts that the server keeps: few, so that they are full in the first half of a short load."""
BLOCKS = 10


@dataclass
class Options:
    """Load a server with clients."""

    run: Path | None = None
    """A trained run; by default the model of `enwik8-small` with random weights."""
    clients: tuple[int, ...] = (1, 16, 64)
    minutes: float = 0.5
    """Time for each number of clients."""
    prompt: tuple[int, int] = (16, 128)
    """Fewest and most bytes of a prompt."""
    new: tuple[int, int] = (64, 256)
    """Fewest and most new tokens."""
    session: int = 100_000
    """Tokens of the long session; 0: none."""
    texts: int = 200
    """Texts of the mixed batch; 0: none."""
    generate: tuple[int, ...] = ()
    """Batch sizes at which `generate` of transformers, version 5 or later, writes the same texts."""
    precision: Literal["fp32", "bf16"] = "fp32"


@dataclass
class Times:
    """What the clients saw."""

    first: list[float] = field(default_factory=list)
    """Seconds to the first token of each text."""
    gaps: list[float] = field(default_factory=list)
    """Seconds per token of each text after its first."""
    tokens: int = 0
    refused: int = 0


def main() -> None:
    options = tyro.cli(Options)
    with (
        tempfile.TemporaryDirectory() as folder,
        served(options.run or random_run(Path(folder)), options) as (url, pid),
    ):
        for count in options.clients:
            print(load(url, pid, count, options), flush=True)
        if options.texts:
            print(mixed(url, options.texts), flush=True)
        if options.session:
            print(long_session(url, options.session), flush=True)
    if options.generate:
        with tempfile.TemporaryDirectory() as folder:
            generate_beside(options.run or random_run(Path(folder)), Path(folder, "exported"), options)


def random_run(folder: Path) -> Path:
    torch.manual_seed(0)
    vocab = Vocab.build("byte", [])
    config = load_recipe("enwik8-small", ["--model.vocab_size", str(len(vocab)), "--corpus.newlines", "keep"])
    return save_checkpoint(folder / "random", model=TransformerXL(config.model), vocab=vocab, config=config)


@contextmanager
def served(run: Path, options: Options) -> Iterator[tuple[str, int]]:
    """The address and the process of a server."""
    words = ["serve", str(run), "--port", "0", "--precision", options.precision]
    words += ["--max-tokens", "200000", "--session-mb", str(STORE)]
    command = [sys.executable, "-m", "transformer_xl", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        print(line, end="")
        yield re.findall(r"http://\S+", line)[0], server.pid
        server.terminate()


def load(url: str, pid: int, count: int, options: Options) -> str:
    times, sizes = Times(), []
    began = time.perf_counter()
    asyncio.run(clients(url, pid, count, options, times, sizes))
    took = time.perf_counter() - began
    points = np.array(sizes[len(sizes) // 2 :])
    slope, error = line_through(np.array([part.mean(0) for part in np.array_split(points, BLOCKS)]))
    return (
        f"{count:3} clients, {took:.0f} s: {times.tokens / took:,.0f} tokens/s; first token p50 {ms(times.first, 50)} "
        f"p95 {ms(times.first, 95)}; a token p50 {ms(times.gaps, 50)} p95 {ms(times.gaps, 95)}; "
        f"{len(times.first)} texts, "
        f"{times.refused} refused; RSS {points[0, 1]:.2f} to {points[-1, 1]:.2f} MB, slope {slope:+.3f} +- {error:.3f} "
        "MB/minute"
    )


def ms(values: list[float], percent: int) -> str:
    return f"{1000 * np.percentile(values, percent):.1f} ms" if values else "-"


async def clients(
    url: str, pid: int, count: int, options: Options, times: Times, sizes: list[tuple[float, float]]
) -> None:
    end, limits = time.perf_counter() + 60 * options.minutes, httpx.Limits(max_connections=None)

    async def watch() -> None:
        while time.perf_counter() < end:
            sizes.append((time.perf_counter() / 60, resident(pid)))
            await asyncio.sleep(0.5)

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as session:
        await asyncio.gather(watch(), *(client(session, number, end, options, times) for number in range(count)))


async def client(session: httpx.AsyncClient, number: int, end: float, options: Options, times: Times) -> None:
    dice, last = np.random.default_rng(number), None
    while time.perf_counter() < end:
        prompt, new = draw(dice, options)
        asked = {"prompt": prompt, "max_tokens": new, "previous_response_id": last, "stream": True}
        asked["stream_options"] = {"include_usage": True}
        began, pieces, end_of_text = time.perf_counter(), [], ""
        async with session.stream("POST", "/v1/completions", json=asked) as answer:
            if answer.status_code == 429:
                times.refused += 1
                await answer.aread()
                await asyncio.sleep(1)
                continue
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    pieces.append(time.perf_counter())
                    end_of_text = line[6:]
        content = json.loads(end_of_text)
        assert content["usage"]["completion_tokens"] == new, content
        last = None if last else content["id"]
        times.first.append(pieces[0] - began)
        times.gaps.append((pieces[-1] - pieces[0]) / (new - 1))
        times.tokens += new


def resident(pid: int) -> float:
    """Resident memory of a process in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def draw(dice: np.random.Generator, options: Options) -> tuple[str, int]:
    """A prompt, and a number of new tokens."""
    length, new = (int(dice.integers(low, high + 1)) for low, high in (options.prompt, options.new))
    return bytes(dice.integers(97, 123, size=length, dtype=np.uint8)).decode(), new


def line_through(points: np.ndarray) -> tuple[float, float]:
    """The slope of a straight line through the points, and its standard error."""
    x, y = points.T - points.T.mean(1, keepdims=True)
    slope = (x @ y) / (x @ x)
    return float(slope), float(np.sqrt(((y - slope * x) ** 2).sum() / max(len(x) - 2, 1) / (x @ x)))


def mixed(url: str, count: int) -> str:
    """Compare texts written together with the same texts alone."""
    dice = np.random.default_rng(1)
    asked = [
        {
            "prompt": dice.integers(256, size=int(dice.integers(1, 700))).tolist(),
            "max_tokens": int(dice.integers(1, 60)),
            "seed": int(dice.integers(1000)),
            "logprobs": 2,
            "echo": bool(dice.integers(2)),
            "store": False,
        }
        for _ in range(count)
    ]

    async def together() -> list[dict]:
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as session:
            return [
                answer.json()
                for answer in await asyncio.gather(*(session.post("/v1/completions", json=each) for each in asked))
            ]

    among = asyncio.run(together())
    with httpx.Client(base_url=url, timeout=600) as session:
        alone = [session.post("/v1/completions", json=each).json() for each in asked]
    keep = lambda answer: [(each["text"], each["logprobs"]) for each in answer["choices"]]  # noqa: E731
    same = sum(keep(one) == keep(other) for one, other in zip(among, alone, strict=True))
    return f"{same} of {count} texts have the same bits alone as among the others"


def long_session(url: str, tokens: int, piece: int = 1000) -> str:
    """Go on with one text; compare the time of its last piece with that of its first."""
    took, last = [], None
    with httpx.Client(base_url=url, timeout=600) as session:
        for _ in range(tokens // piece):
            asked = {"prompt": "" if last else "a", "max_tokens": piece, "previous_response_id": last}
            began = time.perf_counter()
            last = session.post("/v1/completions", json=asked).raise_for_status().json()["id"]
            took.append(time.perf_counter() - began)
    first, end = took[0], took[-1]
    middle = float(np.median(took))
    return (
        f"a session of {tokens:,} tokens: first {piece:,} in {first:.2f} s, last in {end:.2f} s, median {middle:.2f} s"
    )


def generate_beside(run: Path, folder: Path, options: Options) -> None:
    """Tokens a second of transformers, which reads and writes a batch until its longest text ends."""
    import transformers

    words = ["convert", str(run), "--to", str(folder), "--to-format", "huggingface"]
    subprocess.run([sys.executable, "-m", "transformer_xl", *words], check=True, stdout=subprocess.DEVNULL)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True, padding_side="left")
    bf16 = torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16")
    for rows in options.generate:
        dice, tokens, began = np.random.default_rng(0), 0, time.perf_counter()
        while (took := time.perf_counter() - began) < 60 * options.minutes:
            prompts, new = zip(*(draw(dice, options) for _ in range(rows)), strict=True)
            batch = tokenizer(list(prompts), return_tensors="pt", padding=True)
            with bf16:
                model.generate(**batch, do_sample=True, top_k=40, max_new_tokens=max(new), min_new_tokens=max(new))
            tokens += sum(new)
        print(
            f"transformers {transformers.__version__}, generate, {rows} rows: {tokens / took:,.0f} tokens/s", flush=True
        )


if __name__ == "__main__":
    main()
