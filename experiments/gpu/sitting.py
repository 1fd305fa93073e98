"""What all sittings share: parts under a clock, a line of JSON for each, and times on the device."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer


@dataclass
class Sitting:
    """One call of a script on a machine that is lent for minutes. A part that fails stops no other."""

    out: Path
    seconds: float
    device: torch.device
    toy: bool
    """Small sizes, to try a script without a GPU."""
    only: str = ""
    """A regular expression; parts whose names do not contain it are left out."""
    start: float = field(default_factory=time.monotonic)
    lines: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_command_line(cls, seconds: float) -> Sitting:
        parser = argparse.ArgumentParser()
        parser.add_argument("--out", type=Path, required=True, help="the folder of the results")
        parser.add_argument("--seconds", type=float, default=seconds, help="the time of all parts")
        parser.add_argument("--device", default="cuda")
        parser.add_argument("--toy", action="store_true", help="small sizes, to try the script without a GPU")
        parser.add_argument("--only", default="", help="a regular expression: the parts whose names contain it")
        options = parser.parse_args()
        options.out.mkdir(parents=True, exist_ok=True)
        return cls(options.out, options.seconds, torch.device(options.device), options.toy, options.only)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.seconds - (time.monotonic() - self.start)

    def part(self, name: str, least: float) -> Callable[[Callable[[], Any]], None]:
        """Run the decorated function at once, unless fewer than `least` seconds are left, and write its line."""

        def run(measure: Callable[[], Any]) -> None:
            if not re.search(self.only, name):
                return
            begun, line = time.monotonic(), {"part": name}
            if self.left < least:
                line["skipped"] = f"{self.left:.0f} s left, needs {least:.0f}"
            else:
                try:
                    line["found"] = measure()
                except Exception as error:
                    line["error"] = f"{type(error).__name__}: {error}"[:600]
                    line["trace"] = traceback.format_exc()[-2000:]
            line |= {"seconds": round(time.monotonic() - begun, 1), "date": date.today().isoformat()}
            self.lines.append(line)
            with (self.out / "parts.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line)[:1000], flush=True)

        return run

    def run(self, *words: str, log: str, seconds: float) -> str:
        """Run Python with these arguments, and return the end of what it printed; all of it is in the file `log`.

        Raises:
            RuntimeError: it failed, or its time ended.
        """
        with (self.out / log).open("w") as file:
            try:
                status = subprocess.run([sys.executable, *words], stdout=file, stderr=file, timeout=seconds).returncode
            except subprocess.TimeoutExpired:
                status = f"no end after {seconds:.0f} s"
        printed = (self.out / log).read_text()
        if status != 0:
            raise RuntimeError(f"status {status}: {printed[-400:]}")
        return printed[-2500:]

    def finish(self) -> None:
        """Print the table."""
        for line in self.lines:
            state = f"FAILED {line['error']}" if "error" in line else line.get("skipped", "done")
            print(f"{line['part']:44} {line['seconds']:6.1f} s  {state}")
        print(f"{time.monotonic() - self.start:.0f} of {self.seconds:.0f} s")
        sys.exit(any("error" in line for line in self.lines))

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.cuda:
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], Any], seconds: float = 0.25) -> float:
        """The median time of many calls, the device's work included."""
        call()
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=seconds).median * 1e3

    def profile(self, step: Callable[[], Any], steps: int = 3) -> str:
        """PyTorch's table of the 14 kernels that take longest."""
        kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.cuda]
        with profile(activities=kinds, acc_events=True) as found:
            for _ in range(steps):
                step()
            self.wait()
        order = f"self_{self.device.type}_time_total"
        return found.key_averages().table(sort_by=order, row_limit=14, max_name_column_width=70)


def machine(sitting: Sitting) -> dict[str, Any]:
    """The versions and the hardware of this machine, and the commit that `pack` wrote down."""
    from benchmarks.options import hardware

    commit = Path(os.environ.get("TXL_CARRIED", "."), "commit")
    return hardware(str(sitting.device)) | {"commit": commit.read_text().strip() if commit.exists() else ""}


def contract(sitting: Sitting) -> dict[str, Any]:
    """`txl env --check` on this card, and the backend that `auto` takes before and after it.

    Raises:
        RuntimeError: the fused kernels failed, so what follows would measure another backend.
    """
    chosen = []
    for words in ((), ("--check",) if sitting.cuda else ()):
        sitting.run("-m", "transformer_xl", "env", *words, "--json", log="env.log", seconds=min(sitting.left, 120))
        text = (sitting.out / "env.log").read_text()
        chosen.append(json.loads(text[text.index("{\n") :])["auto"]["backend"])
    if sitting.cuda and chosen[1]["name"] != "triton":
        raise RuntimeError(f"auto takes {chosen[1]}")
    return {"before": chosen[0], "after": chosen[1], "said": text[: text.index("{\n")]}
