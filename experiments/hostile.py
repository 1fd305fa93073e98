"""Hostile pickle files: the verdict of `read_pickle`, and the seconds and memory it takes.

    python -m experiments.hostile [--many 1000000]

Each file is read in its own process, forked from one that has only imported the modules.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from transformer_xl.analysis.peak import peak_memory
from transformer_xl.interop.pickles.unpickle import module_state, read_pickle

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import hostile


def row(path: Path) -> str:
    """The table row of one file; call it in a fresh process."""
    before, start = peak_memory(), time.perf_counter()
    try:
        content = read_pickle(path)
        if path.name.startswith("module-"):
            module_state(content)
        verdict = "READ"
    except ValueError as refusal:
        verdict = str(refusal).removeprefix(f"{path} ")
    seconds, peak = time.perf_counter() - start, peak_memory() - before
    return f"| {path.name} | {path.stat().st_size / 1e6:.2f} | {verdict} | {seconds:.2f} | {peak / 1e6:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--many", type=int, default=10**6, help="how large the large ones are")
    many = parser.parse_args().many
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        print("| file | MB | verdict | seconds | peak MB over the bare process |\n|---|---:|---|---:|---:|")
        for path in hostile.write(Path(folder) / "files", f"touch {canary}", many):
            with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
                print(pool.submit(row, path).result(), flush=True)
        print(f"\nThe command of these files was {'RUN' if canary.exists() else 'never run'}.")


if __name__ == "__main__":
    main()
