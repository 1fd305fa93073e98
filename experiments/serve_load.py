"""Load `txl serve` with clients, and print how it holds: tokens per second, waiting times, a long session.

    python -m experiments.serve_load              # `enwik8-small` with random weights, half a minute for each load
    python -m experiments.serve_load --run runs/my --minutes 10

Each client sends one request after another, streamed: a new text, or, every other time, more of its last text.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import torch
import tyro

from transformer_xl import TransformerXL, save_checkpoint
from transformer_xl.config.recipe import load_recipe
from transformer_xl.data.vocab import Vocab


@dataclass
class Options:
    """Load a server with clients."""

    run: Path | None = None
    """A trained run; by default the model of `enwik8-small` with random weights."""
    clients: tuple[int, ...] = (1, 16, 64)
    minutes: float = 0.5
    """Time for each number of clients."""
    session: int = 100_000
    """Tokens of the long session; 0: none."""
    precision: str = "fp32"


Text = tuple[float, float, int]
"""What a client saw: seconds to the first token, seconds per token after it, and the number of tokens."""


def main() -> None:
    options = tyro.cli(Options)
    with (
        tempfile.TemporaryDirectory() as folder,
        served(options.run or random_run(Path(folder)), options.precision) as url,
    ):
        for count in options.clients:
            print(load(url, count, options.minutes), flush=True)
        if options.session:
            print(long_session(url, options.session), flush=True)


def random_run(folder: Path) -> Path:
    torch.manual_seed(0)
    vocab = Vocab.build("byte", [])
    config = load_recipe("enwik8-small", ["--model.vocab_size", str(len(vocab)), "--corpus.newlines", "keep"])
    return save_checkpoint(folder / "random", model=TransformerXL(config.model), vocab=vocab, config=config)


@contextmanager
def served(run: Path, precision: str) -> Iterator[str]:
    """The address of a server."""
    words = ["serve", str(run), "--port", "0", "--precision", precision]
    with subprocess.Popen(
        [sys.executable, "-m", "transformer_xl", *words], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        found = re.findall(r"http://\S+", server.stdout.readline())
        if not found:
            sys.exit(server.wait())  # it has said why
        yield found[0]
        server.terminate()


def load(url: str, count: int, minutes: float) -> str:
    began = time.perf_counter()
    texts = asyncio.run(clients(url, count, began + 60 * minutes))
    speed = sum(tokens for _, _, tokens in texts) / (time.perf_counter() - began)
    first, gap = (1000 * np.percentile(seconds, [50, 95]) for seconds in list(zip(*texts, strict=True))[:2])
    return (
        f"{count:3} clients: {speed:,.0f} tokens/s; p50 and p95: first token {first.round()} ms, a token "
        f"{gap.round(1)} ms; {len(texts)} texts"
    )


async def clients(url: str, count: int, end: float) -> list[Text]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as session:
        texts = await asyncio.gather(*(client(session, number, end) for number in range(count)))
    return [text for each in texts for text in each]


async def client(session: httpx.AsyncClient, number: int, end: float) -> list[Text]:
    dice, last, texts = np.random.default_rng(number), None, []
    while time.perf_counter() < end:
        prompt = bytes(dice.integers(97, 123, size=dice.integers(16, 129), dtype=np.uint8)).decode()
        new = int(dice.integers(64, 257))
        asked = {"prompt": prompt, "max_tokens": new, "previous_response_id": last, "stream": True}
        began, pieces, content = time.perf_counter(), [], ""
        async with session.stream("POST", "/v1/completions", json=asked) as answer:
            async for line in answer.raise_for_status().aiter_lines():
                if line.startswith("data: {"):
                    pieces.append(time.perf_counter())
                    content = line[6:]
        last = None if last else json.loads(content)["id"]
        texts.append((pieces[0] - began, (pieces[-1] - pieces[0]) / (new - 1), new))
    return texts


def long_session(url: str, tokens: int, piece: int = 1000) -> str:
    """Go on with one text; compare the time of its last piece with that of its first."""
    took, last = [], None
    with httpx.Client(base_url=url, timeout=600) as session:
        for _ in range(tokens // piece):
            asked = {"prompt": "" if last else "a", "max_tokens": piece, "previous_response_id": last}
            began = time.perf_counter()
            last = session.post("/v1/completions", json=asked).raise_for_status().json()["id"]
            took.append(time.perf_counter() - began)
    return f"a session of {tokens:,} tokens: first {piece:,} in {took[0]:.2f} s, last in {took[-1]:.2f} s"


if __name__ == "__main__":
    main()
