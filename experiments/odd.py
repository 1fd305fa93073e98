"""Test odd inputs: random command lines with one mistake each, over all options, files and classes of mistakes.

    python -m experiments.odd --draws 300 --seed 0
    python -m experiments.odd --seed 0 --only 17        one of them again, with all that it prints

Each case runs in its own process: one forked from a process that has imported torch and not yet used it, or a new one
if the start of the interpreter matters. The script checks the exit status, the output, the time, and every file that
existed before.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import pty
import re
import resource
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

from experiments.mistakes import REFUSED, RIGHT, Case, Line, drawn

HERE = Path(__file__).resolve()
SECONDS, START = 10, 6
"""Limits in seconds: the time of a case beyond the same line without a mistake, and the time of a start."""
MEMORY = 16 << 30
EXITS = {0, 2, 75, 130, 141}
"""Allowed statuses: success, a user's mistake, stopped and saved, interrupted, output closed by its reader."""
INTERNAL = re.compile(
    r"txl: .*\[Errno|NoneType|<class |object at 0x|Exception ignored|\w+Warning:|\w+Error:|pydevd|Fatal Python"
)
"""Words of the interpreter that our own sentences never contain."""
TEXT = "the quick brown fox jumps over the lazy dog, caf\u00e9 and all\n" * 40
DISH = """[corpus]
unit = "byte"
[model]
n_layer = 1
d_model = 8
n_head = 2
d_head = 3
d_inner = 5
[train]
tgt_len = 7
mem_len = 5
batch_size = 3
max_steps = 2
log_every = 2
eval_every = 0
save_every = 0
[eval]
mem_len = 5
"""
BUILD = """
train dish.toml --data story.txt --out alpha
train dish.toml --data story.txt --out beta --corpus.unit word
convert alpha --to legacy --to-format original
convert alpha --to hugged --to-format huggingface
"""


PLAIN = Case("no mistake", RIGHT[0], "")


class Outcome(NamedTuple):
    """The outcome of a process."""

    status: int | None
    """None if the process was ended because it took too long."""
    stdout: str
    stderr: str
    seconds: float
    """Processor time plus waiting time."""


# ------------------------------------------------------------------------------------------------ the forked process


def serve() -> int:
    """Fork a process for each request on standard input, and report its end on standard output.

    In the forked process this returns the status of the command, so the interpreter ends as it does for `txl`.
    """
    asked, told = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0), os.dup2(null, 1)
    import transformer_xl.cli.journeys.analyse
    import transformer_xl.cli.journeys.attention
    import transformer_xl.cli.journeys.convert
    import transformer_xl.cli.journeys.generate
    import transformer_xl.cli.journeys.train
    import transformer_xl.cli.main
    import transformer_xl.interop

    print("ready", file=told, flush=True)
    for line in asked:
        request = json.loads(line)
        child = os.fork()
        if not child:
            os.close(asked.fileno()), os.close(told.fileno())
            take_over(request)
            return transformer_xl.cli.main()
        print(child, file=told, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=told, flush=True)
    return 0


def take_over(request: Mapping[str, Any]) -> None:
    """Set up this process as `txl` would run: arguments, folder, environment, streams and limits."""
    os.setsid()
    os.chdir(request["folder"])
    if request["gone"]:
        shutil.rmtree(request["folder"])
    for number, (path, flags) in enumerate([("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY)]):
        os.dup2(os.open(request[path], flags), number)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    limits(request["file_limit"])
    sys.argv = ["txl", *request["arguments"]]
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="strict", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def limits(file_limit: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))


# ------------------------------------------------------------------------------------------------------- the worlds


class Place:
    """A folder with a world, an unchanged copy of it, and a process to fork from. It runs one case at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.world, self.first = folder, folder / "world", folder / "first"
        self.world.mkdir(parents=True)
        command = [sys.executable, str(HERE), "--serve"]
        self.server = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment()
        )
        assert self.server.stdout is not None and self.server.stdout.readline() == b"ready\n"
        self.build()

    def environment(self, changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
        own = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        own |= {
            "PYTHONPATH": str(HERE.parent.parent),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "LC_ALL": "C.UTF-8",
        }
        own |= {
            "HOME": str(self.world / "home"),
            "TXL_HOME": str(self.world / "cache"),
            "TERM": "xterm",
            "COLUMNS": "100",
        }
        return {name: value for name, value in (own | dict(changes or {})).items() if value is not None}

    def build(self) -> None:
        """Make everything that a user may have: texts, recipes, words, runs, stores, checkpoints of other programs."""
        for name, text in (("story.txt", TEXT), ("opening.txt", TEXT[:40]), ("dish.toml", DISH)):
            (self.world / name).write_text(text, encoding="utf-8")
        words = sorted({*TEXT.split()})
        (self.world / "lexicon.txt").write_text("\n".join(["<unk>", "<eos>", *words]), encoding="utf-8")
        (self.world / "counts.txt").write_text(
            "".join(f"{word} {9 + i}\n" for i, word in enumerate(words)), encoding="utf-8"
        )
        (self.world / "home").mkdir()
        for split in ("train", "valid", "test"):
            (self.world / "shelf").mkdir(exist_ok=True)
            (self.world / "shelf" / f"{split}.txt").write_text(TEXT, encoding="utf-8")
        for line in BUILD.strip().splitlines():
            done = self.run(shlex.split(line))
            assert done.status == 0, f"{line}: {done}"
        [store] = {path.parent for path in (self.world / "cache").rglob("corpus.json") if '"byte"' in path.read_text()}
        shutil.copytree(store, self.world / "depot")
        self.world.rename(self.first)

    def fresh(self) -> None:
        shutil.rmtree(self.world, ignore_errors=True)
        shutil.copytree(self.first, self.world)

    def run(self, arguments: list[str], case: Case = PLAIN, allowed: float = 60) -> Outcome:
        """Run `txl` in the world and wait for its end, for at most this many seconds."""
        files = {name: self.folder / name for name in STANDARD}
        shutil.copy((self.first if self.first.exists() else self.world) / "opening.txt", files["stdin"])
        for name in ("stdout", "stderr"):
            files[name].write_bytes(b"")
        if case.pty is not None:
            return self.on_terminal(arguments, case, allowed)
        process = Started(self, arguments, case) if case.real else Forked(self, arguments, case)
        status, seconds = watch(process, allowed, lambda: files["stdout"].stat().st_size, self.world, case)
        texts = (files[name].read_bytes().decode(errors="replace") for name in ("stdout", "stderr"))
        return Outcome(status, *texts, seconds)

    def on_terminal(self, arguments: list[str], case: Case, allowed: float) -> Outcome:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *case.pty, 0, 0))
        process = Forked(self, arguments, case, os.ttyname(theirs))
        os.set_blocking(ours, False)
        printed = bytearray()
        status, seconds = watch(process, allowed, lambda: drain(ours, printed), self.world, case)
        drain(ours, printed)
        os.close(ours), os.close(theirs)
        text = printed.decode(errors="replace")
        return Outcome(status, text, text, seconds)


def drain(terminal: int, printed: bytearray) -> bool:
    """Read the output of a terminal, and return whether there has been any output."""
    try:
        while piece := os.read(terminal, 1 << 16):
            printed += piece
    except OSError:  # nothing yet, or nobody is there
        pass
    return bool(printed)


class Forked:
    """A process forked from the one that has imported everything."""

    def __init__(self, place: Place, arguments: list[str], case: Case, terminal: str = "") -> None:
        self.server = place.server
        gone = case.gone
        request: dict[str, Any] = {name: terminal or str(place.folder / name) for name in STANDARD}
        request |= {"arguments": arguments, "folder": str(place.folder / "gone" if gone else place.world), "gone": gone}
        request |= {"environment": place.environment(case.environment), "file_limit": case.file_limit}
        if gone:
            (place.folder / "gone").mkdir(exist_ok=True)
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(json.dumps(request).encode() + b"\n")
        self.pid = int(self.server.stdout.readline())

    def poll(self) -> int | None:
        assert self.server.stdout is not None
        ready = select.select([self.server.stdout], [], [], 0)[0]
        return int(self.server.stdout.readline()) if ready else None


class Started:
    """A new process, with the streams that a case needs."""

    def __init__(self, place: Place, arguments: list[str], case: Case) -> None:
        opened = {name: self.opened(place, name, case.streams.get(name)) for name in STANDARD}
        shut = [f"{number}>&-" for number, name in enumerate(STANDARD) if case.streams.get(name) == "closed"]
        script = f'ulimit -v {MEMORY >> 10}; ulimit -c 0; exec "$0" "$@" {" ".join(shut)}'
        command = ["/bin/sh", "-c", script, sys.executable, "-m", "transformer_xl", *arguments]
        words = [os.fsencode(word) for word in command]
        own = place.environment(case.environment)
        how: dict[str, Any] = {"cwd": place.world, "env": own, "start_new_session": True, **opened}
        self.process = subprocess.Popen(words, **how)
        self.pid, self.poll = self.process.pid, self.process.poll
        for handle in opened.values():
            os.close(handle)

    @staticmethod
    def opened(place: Place, name: str, how: str | None) -> int:
        writes = os.O_WRONLY | os.O_APPEND if name != "stdin" else os.O_RDONLY
        match how:
            case "full":
                return os.open("/dev/full", os.O_WRONLY)
            case "broken":
                reads, writes = os.pipe()
                os.close(reads)
                return writes
            case "folder":
                return os.open(place.folder, os.O_RDONLY)
            case "binary":
                return os.open(sys.executable, os.O_RDONLY)
            case "read only" | "written only":
                return os.open(place.folder / name, os.O_RDONLY if name != "stdin" else os.O_WRONLY)
        return os.open(place.folder / name, writes)


STANDARD = ("stdin", "stdout", "stderr")


def watch(process: Forked | Started, allowed: float, printed: Any, world: Path, case: Case) -> tuple[int | None, float]:
    """Wait for a process, and apply `later` meanwhile. Returns its status (None if it was ended) and its seconds."""
    later = case.later
    used = waited = 0.0
    last = time.monotonic()
    while (status := process.poll()) is None:
        time.sleep(0.02)
        now, since = time.monotonic(), last
        last = now
        try:
            state, *fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        used = (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
        waited += 0 if state == "R" else now - since
        if printed() and later is not None:
            later(world)
            later = None
        if used + waited > allowed:
            os.killpg(process.pid, signal.SIGKILL)
            while process.poll() is None:
                time.sleep(0.02)
            return None, used + waited
    return status, used + waited


# --------------------------------------------------------------------------------------------------------- the laws


def contents(world: Path) -> dict[str, bytes | str]:
    """Every file of a world with its bytes, and every other entry with its kind."""
    found: dict[str, bytes | str] = {}
    for folder, _, names in os.walk(world):
        for name in names:
            path = Path(folder, name)
            kind = "link" if path.is_symlink() else "file" if path.is_file() else "other"
            found[str(path.relative_to(world))] = path.read_bytes() if kind == "file" else kind
    return found


def offences(
    case: Case, outcome: Outcome, before: Mapping[str, bytes | str], after: Mapping[str, bytes | str]
) -> list[str]:
    """The laws that a case breaks."""
    if outcome.status is None:
        return ["hang"]
    heard = case.streams.get("stderr") is None
    found = ["traceback"] if "Traceback (most recent" in outcome.stdout + outcome.stderr else []
    found += [] if outcome.status in EXITS else [f"status {outcome.status}"]
    if not found and (words := INTERNAL.search(outcome.stderr)):
        found.append(f"internal words: {words[0]}")
    if heard and outcome.status not in (0, 141) and not outcome.stderr.strip():
        found.append("silent")
    if heard and outcome.status == 2 and not named(case, outcome):
        found.append("unnamed")
    if outcome.status == 0:
        found += undone(case, outcome, after)
    return found + spoiled(case, outcome, before, after)


def named(case: Case, outcome: Outcome) -> bool:
    """Whether a refusal names the option or file, even if a narrow terminal breaks the name."""
    told = squeezed(outcome.stderr)
    return not case.names or case.line.owner in REFUSED or any(squeezed(name) in told for name in case.names)


def squeezed(text: str) -> str:
    return re.sub(r"[\s│|]|\x1b\[[0-9;]*m", "", text).replace("_", "-")


def undone(case: Case, outcome: Outcome, after: Mapping[str, bytes | str]) -> list[str]:
    """The problems of a successful case."""
    arguments, found = case.command, []
    if case.refuse:
        found.append("accepted")
    if case.notice and not named(case, outcome):
        found.append("unnoticed")
    lost = case.streams.get("stdout") in ("closed", "full", "read only")
    if lost and "stderr" not in case.streams and not outcome.stderr.strip():
        found.append("silent: its output is lost")
    if not case.streams.get("stdout") and not outcome.stdout.strip():
        found.append("silent: it printed nothing")
    if "--json" in arguments and not case.streams and case.pty is None and not is_json(outcome.stdout):
        found.append("no JSON")
    if "fresh" in arguments and not {"--help", "--print-config"} & set(arguments) and case.later is None:
        found += [] if any(name.split("/")[0] == "fresh" for name in after) else ["nothing was written"]
    return found


def is_json(text: str) -> bool:
    try:
        return all(isinstance(json.loads(line), dict) for line in text.splitlines())
    except ValueError:
        return False


def spoiled(
    case: Case, outcome: Outcome, before: Mapping[str, bytes | str], after: Mapping[str, bytes | str]
) -> list[str]:
    """The files that were lost, and the files that should not exist."""
    kept = set(map(digest, after.values()))
    job = (
        {"alpha"}
        if "--resume" in case.command
        else {values[0] for values in case.line.options.values() if len(values) == 1}
    )
    job -= set(case.line.reads) - {"alpha"} if "--resume" in case.command else set(case.line.reads)
    found = []
    for name, content in before.items():
        its_job = name.split("/")[0] in job and outcome.status != 2
        grown = isinstance(content, bytes) and isinstance(now := after.get(name), bytes) and now.startswith(content)
        if case.later is None and digest(content) not in kept and not grown and not its_job:
            found.append(f"lost {name}")
    found += [f"half-written {name}" for name in after if ".tmp-" in name and name not in before]
    if outcome.status == 2 and case.later is None:
        new = [
            n
            for n in after
            if n not in before
            and n.split("/")[0] not in ("cache", "home", "figures")
            and digest(after[n]) not in map(digest, before.values())
        ]
        found += [f"left behind {name}" for name in new[:1]]
    return found


def digest(content: bytes | str) -> str:
    return hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else content


# -------------------------------------------------------------------------------------------------------- the draws


def tried(place: Place, case: Case) -> tuple[Outcome, list[str]]:
    """Run a case in a fresh world and check its outcome against the laws."""
    start = START if case.real else 0
    before, outcome = ran(place, case, SECONDS + start)
    if outcome.status is None:  # which may be the time that the command takes in any case
        place.fresh()
        right = [line for line in RIGHT if line.owner == case.line.owner] or [Line(("--help",), {})]
        plain = max(right, key=lambda line: line.words[:2] == case.line.words[:2])
        before, outcome = ran(place, case, SECONDS + start + place.run(plain.arguments).seconds)
    return outcome, offences(case, outcome, before, contents(place.world))


def ran(place: Place, case: Case, allowed: float) -> tuple[dict[str, bytes | str], Outcome]:
    """The contents of the world before a case, and the outcome of the case."""
    place.fresh()
    if case.before is not None:
        case.before(place.world)
    before = contents(place.world)
    return before, place.run(case.command, case, allowed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of the cases to try")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="odd-") as folder:
        with ThreadPoolExecutor(asked.workers) as pool:
            places: Queue[Place] = Queue()
            for place in pool.map(lambda number: Place(Path(folder, str(number))), range(asked.workers)):
                places.put(place)
            cases = drawn(asked.seed, 10**9 if asked.only else asked.draws, place.first)
            numbers = asked.only or range(len(cases))

            def one(number: int) -> tuple[int, Outcome, list[str]]:
                place = places.get()
                try:
                    return number, *tried(place, cases[number][1])
                finally:
                    places.put(place)

            counts: Counter[tuple[str, str]] = Counter()
            bad = []
            for number, outcome, broken in pool.map(one, numbers):
                kind, case = cases[number]
                show(number, kind, case, outcome, broken, whole=bool(asked.only))
                count(counts, kind, outcome, broken)
                bad += [number] if broken else []
        while not places.empty():
            places.get().server.kill()
    print(table(counts))
    print(f"\n{len(bad)} of {len(numbers)} broke a law: {' '.join(map(str, bad))}")
    return min(len(bad), 1)


def show(number: int, kind: str, case: Case, outcome: Outcome, broken: list[str], *, whole: bool) -> None:
    """Print one line for a good case, and all details of a bad one."""
    verdict = "; ".join(broken) or "as it should"
    print(f"{number} {kind}: {case.what!a}: exit {outcome.status}, {outcome.seconds:.1f} s, {verdict}", flush=True)
    if whole or broken:
        print("   ", ascii(shlex.join(["txl", *case.command]))[1:-1][:400])
        for text in [outcome.stdout, outcome.stderr] if whole else [outcome.stderr]:
            print(
                "".join(f"    | {line[:300]!a}\n" for line in text.splitlines()[-40 if whole else -6 :]),
                end="",
                flush=True,
            )


def count(counts: Counter[tuple[str, str]], kind: str, outcome: Outcome, broken: list[str]) -> None:
    laws = dict.fromkeys(re.match(r"status -?\d+|half-written|left behind|lost|[\w ]+", law)[0] for law in broken)
    for what in ("tried", f"exit {outcome.status}", *(laws or ["as it should"])):
        counts[kind, what] += 1
    counts[kind, "with a sentence"] += bool(outcome.stderr.strip())


def table(counts: Counter[tuple[str, str]]) -> str:
    """The table of outcomes: a row for each class of mistakes."""
    kinds = list(dict.fromkeys(kind for kind, _ in counts))
    columns = sorted(
        {what for _, what in counts}, key=lambda what: (not what.startswith("tried"), not what.startswith("exit"), what)
    )
    rows = [[kind, *(counts[kind, what] for what in columns)] for kind in kinds]
    rows.append(["**all**", *(sum(counts[kind, what] for kind in kinds) for what in columns)])
    lines = [["class of mistake", *columns], ["---", *["---:"] * len(columns)], *rows]
    return "\n" + "\n".join(
        f"| {' | '.join(str(cell or '') if cell != 0 else '' for cell in line)} |" for line in lines
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        sys.exit(serve())
    sys.exit(main())
