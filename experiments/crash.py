"""Check that runs of `txl train`, ended at random moments and resumed, give the results of an undisturbed run.

    python -m experiments.crash --how kill --times 50      SIGKILL, a third while a checkpoint is being written
    python -m experiments.crash --how term --times 20      SIGTERM; also int (SIGINT), and twice (SIGTERM, soon again)
    python -m experiments.crash --how full --times 10      the disk is full: a tmpfs, which root mounts, or --tmpfs DIR

A run is disturbed five times and then runs to its end. A disturbance comes during the start with probability 1/5, the
last one comes during the final scoring with probability 1/3, and otherwise at any time in the rest of training. The
laws: the last checkpoint (every bit of its tensors) and the lines of the metrics equal the undisturbed run's; the run
resumes from its last whole checkpoint; a signal during training loses no step and gives status 75; a full disk gives
status 2 and one sentence, and every checkpoint still loads. Exit status 1 means that a law was broken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from experiments.trial import (
    CRASH,
    SUMS,
    Life,
    differences,
    half_written,
    markdown,
    saved,
    saved_step,
    verdict,
    write_recipe,
)

STOPPED, MISTAKE = 75, 2
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT, "twice": signal.SIGTERM}
ENDED_EARLY = {-signal.SIGTERM, -signal.SIGINT, 130}
"""What a signal gives before training begins and after it ended: the system's own, or Python's, where nothing waits."""
COLUMNS = ("run", "at s", "during", "step", "saved", "steps lost", "s lost", "start-up s", "status", "s to its end")


@dataclass
class Blow:
    """One disturbance and its cost."""

    run: int
    seconds: float
    """Into the life of the process."""
    during: str
    step: int
    """The last one it told of."""
    saved: int
    """That of its last whole checkpoint, from which the next process goes on."""
    status: int
    ending: float
    """Seconds from the disturbance to the end."""
    lost: float
    """Seconds of work since the step that is saved."""
    startup: float = 0.0
    """Seconds that the next process takes to its first step."""
    sentence: str = ""

    def cells(self) -> Sequence[object]:
        lost = (max(self.step - self.saved, 0), self.lost, self.startup)
        return (self.run, self.seconds, self.during, self.step, self.saved, *lost, self.status, self.ending)


class Campaign:
    """Many disturbed runs of one recipe in the folder `runs`; the undisturbed run is next to the recipe."""

    def __init__(self, recipe: Path, how: str, runs: Path, draw: random.Random) -> None:
        self.recipe, self.how, self.runs, self.draw = recipe, how, runs, draw
        self.whole = recipe.parent / "whole"
        self.blows: list[Blow] = []
        self.problems: list[str] = []
        life = self.start(self.whole)
        assert life.end() == 0, f"the undisturbed run failed: {life.complaints}"
        self.max_steps = life.reached
        self.startup, self.ending = life.steps[1], life.age - life.steps[self.max_steps]
        self.training = life.steps[self.max_steps] - life.steps[1]
        self.size = sum(file.stat().st_size for file in saved(self.whole)[-1].iterdir())

    def start(self, run: Path) -> Life:
        """A process that begins the run, or resumes it if a checkpoint exists."""
        if not saved_step(run):
            shutil.rmtree(run, ignore_errors=True)
        resume = ["--resume"] if run.exists() else []
        return Life("train", self.recipe, "--out", run, *resume, home=self.recipe.parent / "home")

    def disturb(self, number: int, most: int) -> None:
        """Disturb one run up to `most` times, then let it end."""
        run, blows, previous = self.runs / f"run-{number}", 0, None
        while True:
            before, left = saved_step(run), half_written(run)
            life = self.start(run)
            blow = self._strike(life, run, number, before, left, most - blows) if blows < most else None
            status = life.end()
            if previous is not None:
                previous.startup = life.steps[life.first] if life.first is not None else life.age
                print(markdown(COLUMNS, [previous.cells()]).splitlines()[-1], flush=True)
            if life.first not in (None, before + 1):
                self.problems.append(f"run {number}: saved at step {before}, it went on with step {life.first}")
            if blow is None:
                break
            self.blows.append(previous := blow)
            blows += 1
        found = [f"status {status}: {life.complaints[-3:]}"] if status else list(differences(run, self.whole))
        self.problems += [f"run {number}, at its end: {problem}" for problem in found]
        if not found:
            shutil.rmtree(run)

    def _wait(self, life: Life, before: int, blows: int) -> bool:
        """Let the process run until the first of `blows` random moments, and return whether it is still running."""
        if self.draw.random() < 1 / 5:
            return life.lives_until(self.draw.uniform(0, self.startup))
        at_end = blows == 1 and self.draw.random() < 1 / 3
        if not life.lives_until_told(self.max_steps if at_end else before + 1):
            return False
        training = self.training * (1 - before / self.max_steps)
        earliest = 1 - self.draw.random() ** (1 / blows)  # of so many uniform ones
        return life.lives_until(life.age + (self.draw.uniform(0, self.ending) if at_end else earliest * training))

    def _strike(self, life: Life, run: Path, number: int, before: int, left: set[str], blows: int) -> Blow | None:
        """Let the process run until a random moment, disturb it, and wait for its end; None if it ended before."""
        aimed = self.how == "kill" and self.draw.random() < 1 / 3
        if not self._wait(life, before, blows):
            return None
        while aimed and life.reached < self.max_steps and not half_written(run) - left:
            if not life.lives_until(life.age + 0.001):
                return None
        writing, begun = bool(half_written(run) - left), bool(life.steps)
        moment = life.age
        status = self._fill(life) if self.how == "full" else self._signal(life)
        if self.how == "full" and status == 0:
            return None
        ending, step, after = life.age - moment, max(life.reached, before), saved_step(run)
        if step >= self.max_steps:
            during = "end"
        elif writing or (self.how == "kill" and half_written(run) - left):
            during = "saving"
        else:
            during = "steps" if begun else "start-up"
        since = life.steps.get(after, life.steps[life.first] if life.first is not None else moment)
        worked = life.age if self.how == "full" else moment
        sentence = life.complaints[-1] if life.complaints else ""
        blow = Blow(number, moment, during, step, after, status, ending, max(worked - since, 0.0), sentence=sentence)
        self.problems += [f"run {number}, {moment:.2f} s: {problem}" for problem in self._broken(blow, life, run)]
        return blow

    def _signal(self, life: Life) -> int:
        life.process.send_signal(SIGNALS[self.how])
        if self.how == "twice" and life.lives_until(life.age + self.draw.uniform(0, 0.02)):
            life.process.send_signal(signal.SIGTERM)
        return life.end(60)

    def _fill(self, life: Life) -> int:
        """Leave no space, or less than a checkpoint needs, until the process has ended; then free the space."""
        room = self.draw.choice([0, int(self.draw.uniform(0, 0.9) * self.size)])
        ballast = self.runs / "ballast"
        with ballast.open("wb") as file:
            while life.lives_until(life.age + 0.02):
                free = os.statvfs(self.runs).f_bavail * os.statvfs(self.runs).f_frsize
                if free > room:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free - room)
        ballast.unlink()
        return life.end()

    def _broken(self, blow: Blow, life: Life, run: Path) -> Iterator[str]:
        """The laws that the run broke after one disturbance."""
        told = "\n".join(life.complaints)
        if "Traceback" in told and not (self.how == "int" and blow.during == "start-up"):  # Python's, while it imports
            yield f"a traceback: {told}"
        if self.how == "full":
            if blow.status != MISTAKE or len(life.complaints) != 1 or not told.startswith("txl: "):
                yield f"the full disk gave status {blow.status} and {life.complaints}"
            yield from filter(None, map(damage, saved(run)))
        elif self.how != "kill":
            outside = blow.during in ("start-up", "end") or self.how == "twice"
            if blow.status != STOPPED and not (outside and blow.status in {0, *ENDED_EARLY}):
                yield f"the signal gave status {blow.status} during {blow.during}"
            if blow.status == STOPPED and blow.saved != blow.step:
                yield f"it stopped at step {blow.step} and saved step {blow.saved}"


def damage(folder: Path) -> str | None:
    """The reason why a checkpoint is not whole; None if it is whole."""
    from transformer_xl.checkpoint import load_model, load_training

    try:
        load_model(folder)
        load_training(folder)
    except (OSError, ValueError) as error:
        return f"{folder.name}: {error}"
    for line in (folder / SUMS).read_text().splitlines() if (folder / SUMS).exists() else ():
        digest, name = line.split(maxsplit=1)
        if hashlib.sha256((folder / name.lstrip("*")).read_bytes()).hexdigest() != digest:
            return f"{folder.name}: {name} has another checksum"
    return None


@contextmanager
def small_disk(given: Path | None, size: int, parent: Path) -> Iterator[Path]:
    """A folder on a file system with room for `size` bytes."""
    if given is not None:
        yield given
        return
    place = parent / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def summary(blows: Sequence[Blow]) -> str:
    """The number of disturbances and their cost, by the phase of the run."""
    rows = []
    for during in ("start-up", "steps", "saving", "end", "all"):
        these = [blow for blow in blows if during in (blow.during, "all")]
        if these:
            steps, seconds = [max(b.step - b.saved, 0) for b in these], [b.lost + b.startup for b in these]
            statuses = ", ".join(map(str, sorted({blow.status for blow in these})))
            row = (during, len(these), median(steps), max(steps), median(seconds), max(seconds))
            rows.append((*row, max(b.ending for b in these), statuses))
    costs = ("steps lost, median", "most", "s lost with start-up, median", "most", "s to its end, most", "statuses")
    return markdown(("during", "times", *costs), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=(*SIGNALS, "full"), default="kill")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="an empty folder; runs that broke a law stay in it")
    parser.add_argument("--tmpfs", type=Path, help="full: an empty folder on a small disk of its own")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = given.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        recipe, draw = write_recipe(work, CRASH, given.seed), random.Random(given.seed)
        campaign, start = Campaign(recipe, given.how, work, draw), time.perf_counter()
        times = f"{campaign.startup:.1f} s to the first step, {campaign.training:.1f} s of training"
        print(f"undisturbed: {times}, {campaign.ending:.1f} s of scoring; ", end="")
        print(f"a checkpoint has {campaign.size / 1e6:.1f} MB\n", flush=True)
        print(markdown(COLUMNS, []), flush=True)
        room = 10 * campaign.size if given.how == "full" else 0
        with small_disk(given.tmpfs, room, work) if room else nullcontext(work) as campaign.runs:
            number = 0
            while len(campaign.blows) < given.times:
                number += 1
                campaign.disturb(number, min(5, given.times - len(campaign.blows)))
    print(f"\n{summary(campaign.blows)}")
    sentences = sorted({blow.sentence for blow in campaign.blows if blow.sentence})
    if given.how == "full":
        print("\n" + "\n".join(f"- {sentence}" for sentence in sentences))
    status = verdict(campaign.problems)
    facts = {"how": given.how, "seed": given.seed, "runs": number, "seconds": time.perf_counter() - start}
    rows = [asdict(blow) for blow in campaign.blows]
    print(json.dumps(facts | {"checkpoint_bytes": campaign.size, "blows": rows, "problems": campaign.problems}))
    return status


if __name__ == "__main__":
    sys.exit(main())
