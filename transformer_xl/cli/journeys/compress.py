"""`txl compress` and `txl decompress`: code a file with the probabilities of a model, and restore it."""

from __future__ import annotations

import hashlib
import json
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from ...checkpoint import LoadedModel, find_checkpoint
from ...config.problems import Problems
from ...config.settings import Lengths
from ...evaluation.archive import MOST_ROWS, MOST_THREADS, Archive, Block, Header, Writer
from ...evaluation.arithmetic import arithmetic, exact_arithmetic
from ...evaluation.coding import CPU, BlockCoder, Predictor, TrainedPredictor, library, self_test
from ...mistake import Mistake
from ...runtime.device import prepare_process, resolve_precision
from ...runtime.files import digest_of, whole_file
from ...runtime.terminal import Output
from ...train import online
from ..options.use import Compress, Decompress
from .native import build_native
from .trained import Trained

ENDING = ".txlz"
BLOCK = 1 << 20
BYTES_A_ROW, DEFAULT_ROWS = 1 << 14, 32
"""A row has at least this many bytes by default, because it starts without a past; there are at most 32."""


def compress(options: Compress) -> None:
    """Code a file block by block, in constant memory."""
    problems = Problems()
    problems.bound(options, "rows", least=1, most=MOST_ROWS)
    problems.bound(options, "threads", least=1, most=MOST_THREADS)
    if options.learn == (options.model is not None):
        problems.append("Give --model RUN or --learn, and not both: the model to code with, or one that learns.")
    target = problems.attempt(lambda: _target(options, options.file, f"{options.file}{ENDING}"))
    problems.attempt(library)
    problems.refuse()
    prepare_process()
    threads = options.threads or torch.get_num_threads()
    with _source(options.file) as source, exact_arithmetic(threads):
        text = source.read(BLOCK)
        size = len(text) if options.file == "-" else max(Path(options.file).stat().st_size, len(text))
        rows = options.rows or max(min(size // BYTES_A_ROW, DEFAULT_ROWS), 1)
        header, predictor = _prepare(options.model, rows, threads)
        with _sink(target) as sink:
            start, writer, coder, number = time.perf_counter(), Writer(sink, header), BlockCoder(predictor), 0
            while text:
                number += 1
                of = "" if options.file == "-" else f" of {-(-size // BLOCK)}"
                writer.block(text, coder.encode(text, f"coding block {number}{of}"))
                text = source.read(BLOCK)
            writer.end()
    _show(options.json, target, writer.length, writer.size, time.perf_counter() - start)


def decompress(options: Decompress) -> None:
    """Restore a file block by block. Refuse a damaged archive, and one that this machine would decode otherwise."""
    problems = Problems()
    default = options.archive.removesuffix(ENDING)
    if options.output is None and options.archive != "-" and default == options.archive:
        problems.append(f"{options.archive} does not end with {ENDING}, so name the file to write by --output.")
    target = problems.attempt(lambda: _target(options, options.archive, default))
    problems.attempt(library)
    problems.refuse()
    prepare_process()
    with _source(options.archive) as source:
        if options.archive != "-":  # a damaged file is refused before the work
            Archive(source, options.archive).check()
            source.seek(0)
        archive = Archive(source, "standard input" if options.archive == "-" else options.archive)
        with exact_arithmetic(archive.header.threads):
            predictor = _repeat(archive, options.model)
            with _sink(target) as sink:
                start, length = time.perf_counter(), 0
                for text in _texts(archive, BlockCoder(predictor)):
                    length += len(text)
                    sink.write(text)
                    sink.flush()
    _show(options.json, target, length, archive.size, time.perf_counter() - start)


def _texts(archive: Archive, coder: BlockCoder) -> Iterator[bytes]:
    """The text of each block, checked; after the last the whole text is checked."""
    digest, length = hashlib.sha256(), 0
    for number, block in enumerate(archive.blocks(), start=1):
        text = _decode(archive.name, coder, block, number)
        digest.update(text)
        length += len(text)
        yield text
    if (length, digest.digest()) != (archive.length, archive.sha256):
        raise Mistake(f"{archive.name} does not give the text that was compressed: its SHA-256 differs.")


def _decode(name: str, coder: BlockCoder, block: Block, number: int) -> bytes:
    try:
        text = coder.decode(block.code, block.length, f"decoding block {number}")
    except (ValueError, AssertionError):  # constriction's errors for a code that cannot be
        text = b""
    if zlib.crc32(text) != block.crc or len(text) != block.length:
        raise Mistake(
            f"Block {number} of {name} gives another text than the one that was compressed. This machine's arithmetic "
            "differs from the encoder's: decompress where the archive was made."
        )
    return text


class Model(NamedTuple):
    """The model of a run, and what an archive says about it."""

    loaded: LoadedModel
    digest: str
    """Half a SHA-256, in hexadecimal digits, of everything that decides the model's probabilities."""
    lengths: dict[str, int]


def _load(run: Path | None) -> Model | None:
    """Load a run that can code, a Transformer-XL of bytes; None for --learn."""
    if run is None:
        build_native(CPU, needed=True)
        return None
    trained = Trained(run, "cpu", "auto")
    config, own = trained.config, trained.config.eval_lengths
    if config.corpus.unit != "byte":
        trained.problems.append(
            f"--model must be a run that reads bytes, and {run} reads a {config.corpus.unit} at a time."
        )
    if config.model.kind != "transformer-xl":
        trained.problems.append(f"--model must be of kind transformer-xl, and {run} is of kind {config.model.kind}.")
    loaded = trained.load(step=True)
    weights = digest_of(find_checkpoint(trained.run) / "model.safetensors")
    facts = f"{weights} {loaded.vocab.fingerprint} {loaded.config.model}"
    lengths = asdict(replace(own, mem_len=own.mem_len or own.tgt_len))
    given = {name: value for name, value in lengths.items() if value is not None}
    return Model(loaded, hashlib.sha256(facts.encode()).hexdigest()[:32], given)


def _predictor(header: Header, model: Model | None) -> Predictor:
    if model is None:
        return online.OnlinePredictor(header.rows, header.precision)
    loaded, lengths = model.loaded, Lengths(**header.lengths)
    return TrainedPredictor(loaded.model, loaded.vocab, lengths, header.rows, header.precision)


def _prepare(run: Path | None, rows: int, threads: int) -> tuple[Header, Predictor]:
    """The header of a new archive, and a new predictor."""
    model = _load(run)
    precision = resolve_precision("auto", CPU)[0]
    what: Any = (
        {"learner": online.LEARNING.name} if model is None else {"model": model.digest, "lengths": model.lengths}
    )
    header = Header(rows=rows, block=BLOCK, threads=threads, precision=precision, machine=arithmetic(), **what)
    return replace(header, test=self_test(_predictor(header, model))), _predictor(header, model)


def _repeat(archive: Archive, run: Path | None) -> Predictor:
    """The predictor of an archive. Refuse another model, and a machine that computes otherwise."""
    header, name = archive.header, archive.name
    if header.model and run is None:
        raise Mistake(f"{name} was made with a model: name its run by --model.")
    if run is not None and not header.model:
        raise Mistake(f"{name} needs no model: leave out --model.")
    if header.learner not in ("", online.LEARNING.name):
        raise Mistake(
            f"{name} was made with the learner {header.learner}, and this version has {online.LEARNING.name}."
        )
    model = _load(run)
    if model is not None and model.digest != header.model:
        raise Mistake(f"{name} was made with another model than {run}. Name the run that it was made with by --model.")
    here, there = arithmetic(), header.machine
    differing = [f"{key} {there.get(key, 'unknown')}, here {here[key]}" for key in here if there.get(key) != here[key]]
    if not differing and self_test(_predictor(header, model)) != header.test:
        differing = ["this machine computes other bits in the self-test"]
    if differing:
        raise Mistake(
            f"{name} was made with other arithmetic, which gives other probabilities: {'; '.join(differing)}."
        )
    return _predictor(header, model)


@contextmanager
def _source(file: str) -> Iterator[BinaryIO]:
    """The file to read, or standard input."""
    if file == "-":
        yield sys.stdin.buffer
        return
    if not Path(file).is_file():
        raise FileNotFoundError(f"There is no file {file}. Give a file, or - for standard input.")
    with Path(file).open("rb") as source:
        yield source


def _target(options: Compress | Decompress, source: str, default: str) -> Path | None:
    """The file to write; None: standard output."""
    name = options.output or ("-" if source == "-" else default)
    if name == "-":
        return None
    path = Path(name)
    if path.exists() and not path.is_file():
        raise Mistake(f"--output must be a file to write, and {path} is a folder, a pipe or a device. Name another.")
    if path.exists() and not options.force:
        raise Mistake(f"{path} exists. Name another file by --output, or replace it with --force.")
    return path


@contextmanager
def _sink(target: Path | None) -> Iterator[BinaryIO | Output]:
    """The file to write, which appears when it is whole, or standard output."""
    if target is None:
        yield Output(sys.stdout.buffer)
        return
    with whole_file(target) as sink:
        yield sink


def _show(as_json: bool, target: Path | None, text: int, archive: int, seconds: float) -> None:
    """Print the sizes and the speed; on standard error if the result is on standard output."""
    bits = 8 * archive / text if text else None
    speed = text / seconds / 1000
    stream = sys.stderr if target is None else sys.stdout
    if as_json:
        facts = {"output": str(target or "-"), "bytes": text, "archive_bytes": archive, "bits_per_byte": bits}
        print(json.dumps(facts | {"seconds": seconds, "kb_per_second": speed}), file=stream)
        return
    rate = "" if bits is None else f", {bits:.3f} bits a byte"
    name = target or "standard output"
    print(f"{name}: {text:,} bytes of text, {archive:,} of archive{rate}, {speed:.2f} KB/s", file=stream)
