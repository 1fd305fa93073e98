"""Contenders that take turns, each in its own process until the measurement ends."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformer_xl.mistake import Mistake

ROOT = Path(__file__).parents[1]
"""The folder from which a process imports this package, and `transformer_xl` if that is not installed."""


class Contender(NamedTuple):
    """A class of a module, with its precision, the Python that runs it, and its checkout of this repository."""

    label: str
    precision: str
    module: str
    name: str
    python: str = sys.executable
    root: Path = ROOT

    @property
    def key(self) -> str:
        return f"{self.label} {self.precision}"


class Process:
    """A running `benchmarks.worker`."""

    def __init__(self, key: str, python: str, root: Path) -> None:
        self.key, self.python = key, python
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self.running = subprocess.Popen(
                [python, "-P", "-m", "benchmarks.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                text=True,
            )
        except OSError as error:
            self.errors.close()
            raise Mistake(
                f"--peers must be a Python interpreter that can be run, got {python} ({error.strerror})."
            ) from error

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            ChildProcessError: the process ended, or reported an exception.
        """
        assert self.running.stdin is not None and self.running.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.running.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self.running.stdin.flush()
            line = self.running.stdout.readline()
        if not line:
            self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildProcessError(
                f"The process of {self.key} ({self.python}) failed: {answer['error']}. If it lacks memory, lower "
                "--batch-size, --tgt-len or --mem-len."
            )
        return answer

    def _ended(self) -> None:
        status = self.running.wait()
        self.errors.seek(0)
        words = self.errors.read().decode(errors="replace").strip().splitlines()
        why = f"; its last line: {words[-1]}" if words else ""
        raise ChildProcessError(f"The process of {self.key} ({self.python}) ended with status {status}{why}.")

    def close(self) -> None:
        for pipe in (self.running.stdin, self.running.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.running.kill()
        self.running.wait()
        self.errors.close()


class Prepared:
    """A contender ready to run."""

    def __init__(self, process: Process, key: str) -> None:
        self.process, self.key = process, key

    def run(self, times: int) -> float:
        return self.process.ask("run", key=self.key, times=times)["seconds"]

    def peak(self) -> int:
        return self.process.ask("peak", key=self.key)["bytes"]

    def call(self, name: str, **arguments: Any) -> Any:
        return self.process.ask("call", key=self.key, name=name, arguments=arguments)["value"]


class Pool:
    """Processes by key, each started at its first use. All end with the `with` block."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.close()
        self.processes.clear()

    def prepare(self, jobs: Mapping[Contender, dict[str, Any]], refused: dict[str, str]) -> dict[str, Prepared]:
        """Prepare contenders in turn. `refused` gets the reason if one cannot take part."""
        ready = {}
        for contender, job in jobs.items():
            process = self._process(contender)
            answer = process.ask("prepare", key=contender.key, module=contender.module, name=contender.name, job=job)
            if "refused" in answer:
                refused[contender.key] = answer["refused"]
            else:
                ready[contender.key] = Prepared(process, contender.key)
        return ready

    def prepare_rate(self, key: str, name: str, job: dict[str, Any]) -> dict[str, Prepared]:
        """Prepare a class of `benchmarks.rates`, which measures this machine; all share one process."""
        process = self._process(Contender("rates", "", "benchmarks.rates", name))
        process.ask("prepare", key=key, module="benchmarks.rates", name=name, job=job)
        return {key: Prepared(process, key)}

    def release(self) -> None:
        """Make all processes drop the contenders that they prepared."""
        for process in self.processes.values():
            process.ask("release")

    def _process(self, contender: Contender) -> Process:
        own = f"{contender.key} {contender.python}"
        if own not in self.processes:
            self.processes[own] = Process(contender.key, contender.python, contender.root)
        return self.processes[own]


class Timing(NamedTuple):
    """Seconds of one unit of work: median, minimum and maximum of the turns."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        return cls(statistics.median(seconds), min(seconds), max(seconds))


def race(runners: Mapping[str, Prepared], repeats: int, *, turn_seconds: float = 0.3) -> dict[str, Timing]:
    """Warm up, then take `repeats` turns, round-robin; a turn has as many units of work as fit `turn_seconds`."""
    times = {}
    for key, runner in runners.items():
        first = runner.run(1)
        again = first if first > 3 * turn_seconds else runner.run(1)
        times[key] = min(100, max(1, math.ceil(turn_seconds / max(again, 1e-6))))
    found: dict[str, list[float]] = {key: [] for key in runners}
    for _ in range(repeats):
        for key, runner in runners.items():
            found[key].append(runner.run(times[key]))
    return {key: Timing.of(seconds) for key, seconds in found.items()}
