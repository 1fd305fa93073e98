"""One hostile client and one that is not: how long the other one waits, and what the server takes.

    python -m experiments.hostile                  # 200 hostile uses, drawn with a seed, one after another
    python -m experiments.hostile --minutes 10     # several at once, for ten minutes

The model is `enwik8-small` with random weights. The hostile client comes from 127.0.0.2, the other one from 127.0.0.1.
Nothing may make the other one wait ten times as long as alone (p95), take 1.5 GB, or write a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tyro

from .serve_load import random_run

Dice = random.Random


@dataclass
class Options:
    """Attack a server."""

    run: Path | None = None
    """A trained run; by default the model of `enwik8-small` with random weights."""
    uses: int = 200
    minutes: float = 0.0
    """Instead of one use after another: several at once, for so long."""
    at_once: int = 8
    seed: int = 0
    only: tuple[str, ...] = ()
    """Kinds of use; by default all."""
    seconds: float = 6.0
    """How long a use goes on at most."""
    options: str = "--session-mb=64"
    """More options of `txl serve`."""


@dataclass
class Server:
    url: str
    process: subprocess.Popen[str]
    log: Path
    port: int = field(init=False)

    def __post_init__(self) -> None:
        self.port = int(self.url.rpartition(":")[2])

    def megabytes(self, name: str = "VmRSS") -> float:
        """Memory now, or its peak since `forget`."""
        found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) / 1024

    def forget(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")


@contextmanager
def served(run: Path, folder: Path, options: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "transformer_xl", "serve", str(run), "--port", "0", *options.split()]
    log = folder / "log"
    with log.open("w") as errors, subprocess.Popen(command, stdout=-1, stderr=errors, text=True) as process:
        assert process.stdout is not None
        yield Server(re.findall(r"http://[\d.:]+", process.stdout.readline())[0], process, log)
        process.terminate()


class Attacker:
    """What a hostile client can do. Each method is a kind of use."""

    def __init__(self, server: Server, seconds: float) -> None:
        self.server: Server = server
        self.seconds: float = seconds

    async def use(self, kind: str, dice: Dice) -> None:
        """One use, which the client leaves after a while."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(getattr(self, kind)(dice), 3 * self.seconds)

    def session(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2", limits=httpx.Limits(max_connections=None))
        return httpx.AsyncClient(base_url=self.server.url, transport=transport, timeout=self.seconds)

    async def post(self, session: httpx.AsyncClient, **asked: Any) -> None:
        with contextlib.suppress(httpx.HTTPError):
            await session.post("/v1/completions", json=asked, headers={"X-Forwarded-For": f"10.0.0.{time.time()}"})

    async def products(self, dice: Dice) -> None:
        """Prompts x tokens x n x log-probabilities, echoed, kept, several at once."""
        async with self.session() as session:
            await asyncio.gather(*(self.post(session, **large(dice)) for _ in range(dice.choice([1, 2, 8, 64]))))

    async def small(self, dice: Dice) -> None:
        """Many small requests, as fast as possible."""
        asked = {"prompt": ["x"] * dice.choice([1, 64]), "n": dice.choice([1, 16]), "max_tokens": dice.choice([0, 1])}
        end = time.monotonic() + self.seconds
        async with self.session() as session:

            async def one() -> None:
                while time.monotonic() < end:
                    await self.post(session, **asked)

            await asyncio.gather(*(one() for _ in range(dice.choice([1, 16, 100]))))

    async def tokens(self, dice: Dice) -> None:
        """Large texts to be cut into tokens, and ids to be put together."""
        path, body = dice.choice(
            [("/tokenize", {"prompt": "ab\u00e9" * 200_000}), ("/detokenize", {"tokens": [65] * 250_000})]
        )
        end = time.monotonic() + self.seconds
        async with self.session() as session:

            async def one() -> None:
                while time.monotonic() < end:
                    with contextlib.suppress(httpx.HTTPError):
                        await session.post(path, json=body)

            await asyncio.gather(*(one() for _ in range(dice.choice([1, 16, 100]))))

    async def leaving(self, dice: Dice) -> None:
        """Requests whose client leaves at once, or in the middle."""
        for _ in range(50):
            await self.raw(request(large(dice)), wait=dice.choice([0, 0.01, 0.1]))

    async def slow_readers(self, dice: Dice) -> None:
        """Large answers that nobody reads."""
        asked = {**large(dice), "stream": dice.random() < 0.7, "store": False}
        await asyncio.gather(*(self.raw(request(asked), wait=self.seconds) for _ in range(dice.choice([1, 8, 64]))))

    async def names(self, dice: Dice) -> None:
        """Odd hosts, paths, headers and methods."""
        words = ["evil.example", "[", "a" * 9000, "\x1b[31m", "\u00e9", "..%2f..%2fetc/passwd", " ", "0"]

        def odd() -> str:
            return dice.choice(words)

        for _ in range(100):
            head = (
                f"{dice.choice(['GET', 'POST', 'X' * 500])} /{odd()} HTTP/1.{dice.choice('0129')}\r\nHost: {odd()}\r\n"
            )
            more = (
                f"{odd()}: {odd()}\r\nAuthorization: {odd()}\r\nContent-Length: {dice.choice(['-1', '5', odd()])}\r\n"
            )
            await self.raw((head + more + "\r\n12345").encode(), wait=0.01)

    async def raw(self, content: bytes, wait: float) -> None:
        """Send bytes, read nothing, and leave."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            place = ("127.0.0.2", 0)
            opened = asyncio.open_connection("127.0.0.1", self.server.port, local_addr=place, limit=1)
            _, writer = await asyncio.wait_for(opened, self.seconds)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            try:
                writer.write(content)
                await asyncio.wait_for(writer.drain(), max(wait, 0.01))
                await asyncio.sleep(wait)
            finally:
                writer.transport.abort()


def large(dice: Dice) -> dict[str, Any]:
    """A request whose sizes are drawn, evenly on a logarithmic scale."""
    up_to = lambda most: int(most ** dice.random())  # noqa: E731
    return {
        "prompt": ["ab" * up_to(65_536)] * up_to(64),
        "max_tokens": up_to(16_385) - dice.choice([0, 1]),
        "n": up_to(16),
        "logprobs": dice.choice([None, 0, 1, 20]),
        "echo": dice.random() < 0.5,
        "stream": dice.random() < 0.5,
        "store": dice.random() < 0.5,
    }


def request(asked: dict[str, Any]) -> bytes:
    body = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def other_client(url: str, out: Connection) -> None:
    """Small requests, one after another: when each began, and its milliseconds. One that fails counts as a minute."""
    asked = {"prompt": "The other", "max_tokens": 8}
    with httpx.Client(base_url=url, timeout=60) as session:
        while True:
            began, took = time.monotonic(), 60_000.0
            try:
                session.post("/v1/completions", json=asked).raise_for_status()
                took = 1000 * (time.monotonic() - began)
            except httpx.HTTPError as error:
                print(f"  the other client: {error!r}", flush=True)
            out.send((began, took))
            time.sleep(0.02)


@dataclass
class Other:
    """The other client, in a process of its own."""

    received: Connection
    times: list[tuple[float, float]] = field(default_factory=list)

    async def beside(self, attack: Awaitable[object]) -> list[float]:
        """Its times while an attack goes on, with what was still to come then."""
        began = time.monotonic()
        await attack
        ended = time.monotonic()
        while not self.times or self.times[-1][0] < ended:
            while self.received.poll():
                self.times.append(self.received.recv())
            await asyncio.sleep(0.05)
        found = [took for start, took in self.times if began <= start < ended]
        self.times = self.times[-1:]
        return found


@contextmanager
def another(url: str) -> Iterator[Other]:
    context = multiprocessing.get_context("spawn")
    received, out = context.Pipe(duplex=False)
    process = context.Process(target=other_client, args=(url, out), daemon=True)
    process.start()
    yield Other(received)
    process.terminate()


async def attacked(server: Server, other: Other, options: Options) -> None:
    kinds = [
        each for each in vars(Attacker) if each not in ("use", "session", "post", "raw") and not each.startswith("_")
    ]
    kinds = [kind for kind in kinds if not options.only or kind in options.only]
    attacker = Attacker(server, options.seconds)
    os.nice(10)
    await other.beside(asyncio.sleep(2))
    alone = np.percentile(await other.beside(asyncio.sleep(10)), [50, 95])
    start = server.megabytes()
    print(f"alone: p50 {alone[0]:.1f}, p95 {alone[1]:.1f} ms; {start:.0f} MB", flush=True)
    server.forget()
    if options.minutes:
        await for_minutes(server, other, attacker, kinds, options, alone[1])
        return
    worst: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(options.uses):
        kind = kinds[number % len(kinds)]
        took = await other.beside(attacker.use(kind, Dice(f"{options.seed} {number}")))
        worst[kind] += took
        peak = server.megabytes("VmHWM")
        if len(took) and (np.percentile(took, 95) > 10 * alone[1] or peak > 1500):
            print(f"  use {number}, {kind}: p95 {np.percentile(took, 95):.0f} ms, peak {peak:.0f} MB", flush=True)
    for kind, took in worst.items():
        p50, p95, most = np.percentile(took or [0], [50, 95, 100])
        ratio = f"{p95:8.1f} ms = {p95 / alone[1]:5.1f} x alone"
        print(f"{kind:14} p50 {p50:8.1f}  p95 {ratio}  most {most:8.1f} ms  n {len(took)}")
    await asyncio.sleep(30)
    print(f"peak {server.megabytes('VmHWM'):.0f} MB; half a minute later {server.megabytes():.0f} MB")


async def for_minutes(
    server: Server, other: Other, attacker: Attacker, kinds: list[str], options: Options, alone: float
) -> None:
    end, memory, uses = time.monotonic() + 60 * options.minutes, [], 0

    async def attack(number: int) -> None:
        nonlocal uses
        dice = Dice(f"{options.seed} {number}")
        while time.monotonic() < end:
            await attacker.use(dice.choice(kinds), dice)
            uses += 1

    async def watch() -> None:
        while time.monotonic() < end:
            memory.append((time.monotonic() / 60, server.megabytes()))
            await asyncio.sleep(1)

    took = await other.beside(asyncio.gather(watch(), *(attack(number) for number in range(options.at_once))))
    p50, p95, most = np.percentile(took, [50, 95, 100])
    minutes, megabytes = np.array(memory[len(memory) // 2 :]).T
    slope = np.polyfit(minutes, megabytes, 1)[0]
    ratio = f"{p95:.1f} ms = {p95 / alone:.1f} x alone"
    print(f"beside {uses} uses: p50 {p50:.1f}, p95 {ratio}, most {most:.0f} ms, n {len(took)}")
    peak = server.megabytes("VmHWM")
    print(f"memory: median {np.median(megabytes):.0f} MB, peak {peak:.0f}, slope {slope:+.1f} MB a minute")


def main() -> None:
    options = tyro.cli(Options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = options.run or random_run(folder)
        with served(run, folder, options.options) as server, another(server.url) as other:
            asyncio.run(attacked(server, other, options))
            began = time.monotonic()
        print(f"ended in {time.monotonic() - began:.1f} s")
        log = (folder / "log").read_text(errors="replace")
    print(f"log: {len(log):,} characters, {log.count('Traceback')} tracebacks\n{log[-2000:]}")


if __name__ == "__main__":
    main()
