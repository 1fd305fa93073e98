"""Compressed sizes of the same inputs: `txl compress --learn` beside xz, bzip2, zstd and brotli.

    python -m experiments.compression --enwik8 PATH [--sizes 1000000 10000000] [--json FILE]

The inputs are the first bytes of enwik8, a tar of this package's source, and random bytes. zstd and brotli need the
packages zstandard and brotli. Every size is that of the whole file. `--check` also decompresses and compares.
"""

from __future__ import annotations

import argparse
import bz2
import importlib
import io
import json
import lzma
import random
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "transformer_xl"
NOISE = 300_000


def xz(text: bytes) -> bytes:
    return lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)


def zstd(text: bytes) -> bytes:
    library: Any = importlib.import_module("zstandard")
    return library.ZstdCompressor(level=19).compress(text)


def brotli(text: bytes) -> bytes:
    library: Any = importlib.import_module("brotli")
    return library.compress(text, quality=11, lgwin=24)


OTHERS: dict[str, Callable[[bytes], bytes]] = {
    "xz -9e": xz,
    "bzip2 -9": bz2.compress,
    "zstd -19": zstd,
    "brotli -11": brotli,
}


def inputs(enwik8: Path | None, sizes: list[int]) -> Iterator[tuple[str, bytes]]:
    """The name and the bytes of each input."""
    for size in sizes if enwik8 else ():
        with Path(str(enwik8)).open("rb") as file:
            yield f"enwik8, first {size:,}", file.read(size)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.toml")]):
            entry = tarfile.TarInfo(str(path.relative_to(PACKAGE.parent)))
            entry.size = path.stat().st_size
            tar.addfile(entry, io.BytesIO(path.read_bytes()))
    yield "transformer_xl/, a tar", stream.getvalue()
    yield f"random, {NOISE:,}", random.Random(0).randbytes(NOISE)


def ours(text: bytes, *options: str, check: bool) -> dict[str, Any]:
    """What `txl compress --json` prints; with `check` the archive is decompressed and compared."""
    with tempfile.TemporaryDirectory() as folder:
        file, back = Path(folder, "file"), Path(folder, "back")
        file.write_bytes(text)
        facts = txl("compress", str(file), *options)
        if check:
            facts["decompress_kb_per_second"] = txl("decompress", f"{file}.txlz", "--output", str(back))[
                "kb_per_second"
            ]
            assert back.read_bytes() == text, "another text came back"
        return facts


def txl(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "transformer_xl", *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=PACKAGE.parent).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--enwik8", type=Path)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1_000_000])
    parser.add_argument("--threads", default="1")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = {}
    print("| | bytes |", " | ".join([*OTHERS, "txl --learn", "KB/s"]), "|")
    for name, text in inputs(asked.enwik8, asked.sizes):
        sizes = {other: len(compress(text)) for other, compress in OTHERS.items()}
        learned = ours(text, "--learn", "--threads", asked.threads, check=asked.check)
        found[name] = {"bytes": len(text), **sizes, "txl --learn": learned}
        row = [name, f"{len(text):,}", *(f"{size:,}" for size in sizes.values())]
        print(
            "|", " | ".join([*row, f"{learned['archive_bytes']:,}", f"{learned['kb_per_second']:.1f}"]), "|", flush=True
        )
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
