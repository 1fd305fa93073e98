"""Compressed sizes of the same bytes: `txl compress` beside xz, bzip2, zstd and brotli.

    python -m experiments.compression [--enwik8 PATH --sizes 1000000 10000000] [--check]
    python -m experiments.compression --enwik8 PATH --model RUN --bytes 95000000 96000000 [--check]

The first command measures `--learn` on the first bytes of enwik8, a tar of this package's source, and random bytes. The
second measures a trained model on the bytes FIRST to LAST, and prints the archive beside the model's own loss, twice:
read one byte at a time, as the coder reads, and in segments by `txl eval`.

Every size is that of the whole file. `--check` also decompresses and compares. zstd and brotli need the packages
zstandard and brotli.
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

import numpy as np
from jaxtyping import Bool, Float, UInt8

from transformer_xl import load_model
from transformer_xl.config.settings import Lengths
from transformer_xl.evaluation.archive import Archive
from transformer_xl.evaluation.arithmetic import exact_arithmetic
from transformer_xl.evaluation.coding import BlockCoder, TrainedPredictor

PACKAGE = Path(__file__).parents[1] / "transformer_xl"
NOISE = 1_000_000


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


def inputs(asked: argparse.Namespace) -> Iterator[tuple[str, bytes]]:
    """The name and the bytes of each input."""
    spans = [asked.bytes] if asked.model else [(0, size) for size in asked.sizes if asked.enwik8]
    for first, last in spans:
        with asked.enwik8.open("rb") as file:
            file.seek(first)
            yield f"enwik8, bytes {first:,} to {last:,}", file.read(last - first)
    if not asked.model:
        yield "transformer_xl/, a tar", source()
        yield f"random, {NOISE:,}", random.Random(0).randbytes(NOISE)


def source() -> bytes:
    """A tar of this package's source."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.toml")]):
            entry = tarfile.TarInfo(str(path.relative_to(PACKAGE.parent)))
            entry.size = path.stat().st_size
            tar.addfile(entry, io.BytesIO(path.read_bytes()))
    return stream.getvalue()


def ours(file: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """What `txl compress --json` prints, after the archive was decompressed and compared if that was asked."""
    model = ["--model", asked.model] if asked.model else []
    facts = txl("compress", file, *(model or ["--learn"]), "--threads", asked.threads, "--force")
    if asked.check:
        back = file.with_name("back")
        again = txl("decompress", f"{file}.txlz", "--output", back, "--force", *model)
        facts["decompress_kb_per_second"] = again["kb_per_second"]
        assert back.read_bytes() == file.read_bytes(), "another text came back"
    return facts


def txl(command: str, *arguments: object) -> Any:
    """What a command prints as JSON."""
    words = [sys.executable, "-m", "transformer_xl", command, *map(str, arguments), "--json"]
    return json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)


class Counted(TrainedPredictor):
    """Adds up the bits of each byte by the model's own probabilities, without the share of unknown bytes."""

    bits = 0.0

    def read(self, symbols: UInt8[np.ndarray, " B"], live: Bool[np.ndarray, " B"]) -> None:
        assert np.isin(symbols[live], self.known).all(), "the model has no probability for a byte that it does not know"
        probs: Float[np.ndarray, " B"] = self.next[np.arange(self.rows), self.ids[symbols]]
        self.bits -= np.log2(probs[live]).sum()
        super().read(symbols, live)


def own_losses(file: Path, run: Path) -> dict[str, float]:
    """Bits a byte by the model: with the reading that the archive's header describes, and by `txl eval`."""
    with Path(f"{file}.txlz").open("rb") as stream:
        header, loaded, text = Archive(stream, "archive").header, load_model(run), file.read_bytes()
    with exact_arithmetic(header.threads):
        model = Counted(loaded.model, loaded.vocab, Lengths(**header.lengths), header.rows, header.precision)
        coder = BlockCoder(model)
        for start in range(0, len(text), header.block):
            coder.encode(text[start : start + header.block])
    options = ("--data", file, "--device", "cpu", "--precision", header.precision, "--batch-size", header.rows)
    evaluated = txl("eval", run, *options, "--max-tokens", 0)
    return {"one byte at a time": model.bits / len(text), "in segments": evaluated["results"][0]["bpc"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--enwik8", type=Path)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1_000_000])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--bytes", type=int, nargs=2, metavar=("FIRST", "LAST"), default=[95_000_000, 96_000_000])
    parser.add_argument("--threads", default="1")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.model and not asked.enwik8:
        parser.error("--model needs --enwik8")
    found = {}
    print("| | bytes |", " | ".join([*OTHERS, "txl", "bits a byte", "KB/s"]), "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "text")
        for name, text in inputs(asked):
            file.write_bytes(text)
            facts, others = ours(file, asked), {other: len(compress(text)) for other, compress in OTHERS.items()}
            sizes = (len(text), *others.values(), facts["archive_bytes"])
            rates = f"{facts['bits_per_byte']:.4f} | {facts['kb_per_second']:.1f}"
            print("|", " | ".join([name, *(f"{size:,}" for size in sizes), rates]), "|", flush=True)
            losses = own_losses(file, asked.model) if asked.model else {}
            for reading, loss in losses.items():
                ratio = facts["bits_per_byte"] / loss
                print(f"the model {reading}: {loss:.4f} bits a byte; the archive is {ratio:.4f} times that", flush=True)
            found[name] = {**others, "txl": facts, "losses": losses}
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
