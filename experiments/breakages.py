"""Mutation tests: break the package at random, one piece of code at a time, and check that the tests fail.

    pip install "pytest-cov<7"
    python -m experiments.breakages --seed 0            # 120 mutations of the last commit; can be resumed
    python -m experiments.breakages --seed 0 --only 17  # one of them again

The kinds of mutation come from cosmic-ray and mutmut: another operator or comparison, a number plus one, a negated
condition, a loop without rounds, break for continue, another exception caught, a decorator or keyword argument removed,
a value replaced by None. Strings and annotations do not change. First, one run of the tests of `make test` under
coverage finds the tests that execute each line, in this process or in commands that they start. A mutation meets the
tests of its room that execute its line, quickest first, until one is red; then the tests of the other rooms. A line
that runs at import meets the tests of the lines that use its name, and a line without a test meets all tests of its
room.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple
from xml.etree import ElementTree

PACKAGE = "transformer_xl"
SHAPES = ["--jaxtyping-packages=transformer_xl,shapes.check"]
SLOWER, START = 10, 120
"""A mutation counts as dead if its tests take this many times as long as before, plus START seconds."""
QUIET = "no-data-collected,module-not-imported,module-not-measured,already-imported,trace-changed,dynamic-conflict"
SWAPPED: dict[type[ast.AST], type[Any]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Break: ast.Continue,
    ast.Continue: ast.Break,
}


class Mutation(NamedTuple):
    """A piece of a file, the bytes from `start` to `end`, and its replacement."""

    file: str
    line: int
    start: int
    end: int
    new: str
    lines: frozenset[int]
    """The lines whose tests it meets."""
    name: str
    """The name whose uses it meets, too, if it is not in a function."""

    @property
    def room(self) -> str:
        return Path(self.file).parts[1]


class Tests(NamedTuple):
    """The results of the run under coverage."""

    lines: dict[str, dict[int, set[str]]]
    """Of each file and line: the tests that execute it."""
    seconds: dict[str, float]


def mutations(root: Path) -> list[Mutation]:
    """Every mutation of the package, in order of files and lines."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        source = path.read_bytes()
        starts = [0, *(match.end() for match in re.finditer(rb"\n", source))]
        for node, new, statement, inside in _changes(ast.parse(source)):
            start, end = (starts[line - 1] + column for line, column in _span(node))
            whole = (
                statement if isinstance(statement, ast.FunctionDef) else node
            )  # a default is used by the whole function
            lines = {statement.lineno, *range(whole.lineno, (whole.end_lineno or whole.lineno) + 1)}
            name = "" if inside else _name_of(statement)
            file = str(path.relative_to(root))
            found.append(Mutation(file, node.lineno, start, end, new, frozenset(lines), name))
    return found


def _span(node: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _name_of(statement: Any) -> str:
    target = getattr(statement, "target", None) or next(iter(getattr(statement, "targets", [])), statement)
    return getattr(target, "id", None) or getattr(target, "name", "")


def _changes(tree: ast.AST) -> Iterator[tuple[Any, str, Any, bool]]:
    """Each node that changes, its new source, its statement, and whether it runs when a function is called."""
    todo: list[tuple[Any, Any, bool]] = [(node, node, False) for node in ast.iter_child_nodes(tree)]
    while todo:
        node, statement, inside = todo.pop()
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            continue  # Python 3.11 has wrong columns inside f-strings
        statement = node if isinstance(node, ast.stmt) else statement
        for piece, new in _changed(node):
            at_import = isinstance(node, ast.FunctionDef) or not inside
            yield piece, new, statement, not at_import
        for field, child in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            below = inside or (isinstance(node, ast.FunctionDef | ast.Lambda) and field == "body")
            children = child if isinstance(child, list) else [child]
            todo += [(part, statement, below) for part in children if isinstance(part, ast.AST)]


def _changed(node: Any) -> Iterator[tuple[Any, str]]:
    """Each piece of a node that changes, and its new source."""
    match node:
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() if type(node.op) in SWAPPED:
            yield node, _with(node, op=SWAPPED[type(node.op)]())
        case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
            yield node, _with(node, ops=[SWAPPED[type(operator)]()])
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int() | float()):
            yield node, f"({node.value} + 1)"
        case ast.Call():
            for index in range(len(node.keywords)):
                yield node, _with(node, keywords=node.keywords[:index] + node.keywords[index + 1 :])
        case ast.FunctionDef():
            for decorator in node.decorator_list:
                yield decorator, "(lambda kept: kept)"
        case _:
            yield from _changed_flow(node)


def _changed_flow(node: Any) -> Iterator[tuple[Any, str]]:
    """The same as `_changed`, for nodes that control the flow or the meaning of a name."""
    match node:
        case ast.Break() | ast.Continue():
            yield node, ast.unparse(SWAPPED[type(node)]())
        case ast.If() | ast.While() | ast.IfExp():
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        case ast.For():
            yield node.iter, "()"
        case ast.ExceptHandler(type=ast.expr()):
            yield node.type, "StopAsyncIteration"
        case ast.Assign(value=ast.expr()) | ast.AnnAssign(value=ast.expr()):
            yield node.value, "None"


def _with(node: Any, **changes: Any) -> str:
    new = copy.copy(node)
    for name, value in changes.items():
        setattr(new, name, value)
    source = ast.unparse(new)
    return f"({source})" if isinstance(node, ast.expr) else source


def unpack_commit(root: Path) -> None:
    """Write the files of the last commit of this repository into `root`."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=Path(__file__).parents[1], check=True, capture_output=True)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as opened:
        opened.extractall(root, filter="data")


def run_tests(root: Path, arguments: list[str], seconds: float | None = None) -> int:
    """Run pytest on the package in `root`, in a process group of its own, and return its exit status."""
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *SHAPES, *arguments]
    with (root / "pytest.log").open("wb") as log:
        running = subprocess.Popen(
            command, cwd=root, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return running.wait(seconds)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def map_tests(root: Path) -> Tests:
    """Run the whole suite under coverage, unless this was done before, and read the lines that each test executes."""
    times, config = root / "times.xml", root / "coverage.ini"
    if not times.exists():
        config.write_text(f"[run]\nsource = {PACKAGE}\nparallel = true\ndisable_warnings = {QUIET}\n")
        coverage = [f"--cov={PACKAGE}", f"--cov-config={config}", "--cov-context=test", "--cov-report="]
        chosen = ["-m", "not outside", "-n", "auto", "--dist", "worksteal", "-o", "timeout=600"]
        run_tests(root, [*chosen, *coverage, f"--junitxml={root / 'whole.xml'}"])
        if not (root / ".coverage").exists():
            raise SystemExit(f"The suite did not end; see {root / 'pytest.log'}.")
        (root / "whole.xml").rename(times)
    from coverage import CoverageData

    seconds = {}
    for case in ElementTree.parse(times).iter("testcase"):
        if not list(case) and "classname" in case.attrib:  # neither failed nor skipped
            seconds[_test_id(case.attrib)] = float(case.attrib["time"])
    data = CoverageData(str(root / ".coverage"))
    data.read()
    beside: dict[str, set[str]] = defaultdict(set)
    for test in seconds:
        beside[test.partition("::")[0]].add(test)
    lines: dict[str, dict[int, set[str]]] = {}
    for file in data.measured_files():
        lines[str(Path(file).relative_to(root))] = named = {}
        for line, contexts in data.contexts_by_lineno(file).items():
            phases = [context.partition("|") for context in contexts]
            own = {test for test, _, _ in phases} & seconds.keys()
            # A fixture of a whole module runs in the setup of its first test, and all tests of the module use it.
            named[line] = own.union(*(beside[test.partition("::")[0]] for test, _, phase in phases if phase == "setup"))
    return Tests(lines, seconds)


def _test_id(case: dict[str, str]) -> str:
    """The name of a test for pytest, from the dotted module, perhaps with a class, and the function."""
    folders, module, owner = re.fullmatch(r"(.*)\b(test_\w+)\.?(.*)", case["classname"]).groups()  # type: ignore
    return "::".join(filter(None, [f"{folders.replace('.', '/')}{module}.py", owner, case["name"]]))


def tests_of(mutation: Mutation, tests: Tests, root: Path) -> list[str]:
    """The tests that may detect a mutation, the fastest first."""
    own = tests.lines.get(mutation.file, {})
    found = set().union(*(own.get(line, ()) for line in mutation.lines))
    if mutation.name:
        word = re.compile(rf"\b{mutation.name}\b")
        for file, lines in tests.lines.items():
            for line, text in enumerate((root / file).read_text().splitlines(), start=1):
                if word.search(text):
                    found |= lines.get(line, set())
    found = found or {test for test in tests.seconds if test.startswith(f"tests/{mutation.room}/")}
    return sorted(found, key=lambda test: (tests.seconds[test], test))


def try_mutation(mutation: Mutation, tests: list[str], seconds: dict[str, float], root: Path) -> dict[str, Any]:
    """Break the code in `root`, run the tests of the room, then the others, and restore the code."""
    path = root / mutation.file
    source = path.read_bytes()
    changed = source[: mutation.start] + mutation.new.encode() + source[mutation.end :]
    inside = [test for test in tests if test.startswith(f"tests/{mutation.room}/")]
    others = [test for test in tests if test not in set(inside)]
    result: dict[str, Any] = {"died": "", "tests": len(tests)}
    path.write_bytes(changed)
    try:
        compile(changed, path, "exec")
        for where, part in (("room", inside), ("rest", others)):
            if part and not result["died"]:
                (root / "ids").write_text("\n".join(part))
                longest = START + SLOWER * sum(seconds[test] for test in part)
                limit = 60 + SLOWER * max(seconds[test] for test in part)
                status = run_tests(root, ["-x", "-n", "0", "-o", f"timeout={limit:.0f}", f"@{root / 'ids'}"], longest)
                result["died"] = where if status else ""
                result["by"] = _first_red(root) if status else ""
    except SyntaxError:
        result["died"] = "syntax"
    finally:
        path.write_bytes(source)
    return result


def _first_red(root: Path) -> str:
    """The first red test in the output of pytest, or its last line if there is none."""
    lines = (root / "pytest.log").read_text(errors="replace").splitlines() or ["no output"]
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])[:200]


def show(mutation: Mutation, root: Path) -> str:
    """A readable line: the position of a mutation, the old code and the new code."""
    source = (root / mutation.file).read_bytes()
    old = " ".join(source[mutation.start : mutation.end].decode().split())
    new = " ".join(mutation.new.split())
    return f"{mutation.file.removeprefix(PACKAGE + '/')}:{mutation.line}: {old[:90]} -> {new[:90]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=120)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", type=int, help="one mutation, by its number")
    parser.add_argument("--folder", type=Path, default=Path("runs/breakages"), help="of copies and results")
    options = parser.parse_args()
    roots = [(options.folder / f"copy{job}").resolve() for job in range(options.jobs)]
    for root in roots:
        if not root.exists():
            root.mkdir(parents=True)
            unpack_commit(root)
    tests, everything = map_tests(roots[0]), mutations(roots[0])
    chosen = random.Random(options.seed).sample(everything, options.draws)
    results = options.folder / f"seed{options.seed}.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    known = {entry["number"]: entry for entry in map(json.loads, lines)}
    free: Queue[Path] = Queue()
    for root in roots:
        free.put(root)

    def judge(number: int) -> None:
        root = free.get()
        try:
            mutation = chosen[number]
            entry = {"number": number, "room": mutation.room, "what": show(mutation, root)}
            known[number] = entry | try_mutation(mutation, tests_of(mutation, tests, root), tests.seconds, root)
        finally:
            free.put(root)
        with results.open("a") as file:
            file.write(json.dumps(known[number]) + "\n")
        print(known[number], flush=True)

    numbers = [options.only] if options.only is not None else [n for n in range(options.draws) if n not in known]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(judge, numbers))
    if options.only is None:
        print_table(list(known.values()))


def print_table(entries: list[dict[str, Any]]) -> None:
    """Print the number of detected mutations by room, and the undetected ones."""
    rooms = defaultdict(list)
    for entry in entries:
        rooms[entry["room"]].append(entry["died"])
    print("| room | mutations | died by its tests | by the rest | survived |\n|---|---|---|---|---|")
    for room, died in [*sorted(rooms.items()), ("all", [entry["died"] for entry in entries])]:
        own, rest = sum(where in ("room", "syntax") for where in died), died.count("rest")
        print(f"| {room} | {len(died)} | {own} | {rest} | {died.count('')} |")
    for entry in sorted(entries, key=lambda entry: entry["number"]):
        if not entry["died"]:
            print(f"{entry['number']}: {entry['what']} ({entry['tests']} tests)")


if __name__ == "__main__":
    main()
