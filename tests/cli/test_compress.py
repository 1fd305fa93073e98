"""`txl compress` and `txl decompress`: files come back whole; everything else is refused before a byte is written."""

from __future__ import annotations

import io
import json
import random
import resource
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shlex import split as words
from typing import Any

import pytest
import torch

from transformer_xl.cli.journeys import compress as journey
from transformer_xl.cli.main import main
from transformer_xl.data.vocab import Vocab
from transformer_xl.evaluation.archive import MAGIC, Archive, Header, Writer
from transformer_xl.train import online

pytest.importorskip("constriction")
ROOT = Path(__file__).parents[2]
SMALL = words("--model.n-layer 1 --model.d-model 8 --model.n-head 2 --model.d-head 4 --model.d-inner 5")
SMALL += words("--train.tgt-len 7 --train.mem-len 5 --train.batch-size 3 --train.max-steps 2 --train.log-every 2")
SMALL += words("--train.eval-every 0 --eval.mem-len 5 --train.sample-every 0 --train.save-every 0")
TEXT = b"ab cab\n" * 170
HOW = pytest.mark.parametrize("how", [["--learn"], ["--model", "run"]], ids=["learn", "model"])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a text, two runs with only its bytes and one of words; a learner and blocks of toy sizes."""
    folder = tmp_path_factory.mktemp("compress")
    sizes = {"n_layer": 1, "n_head": 2, "d_head": 4, "d_model": 8, "d_inner": 5, "ngram_rows": 97, "ngram_width": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TXL_HOME", str(folder / "cache"))
        patch.chdir(folder)
        patch.setattr(journey, "BLOCK", 500)
        patch.setattr(journey, "BYTES_A_ROW", 150)
        quick = replace(online.LEARNING.train, tgt_len=4, mem_len=4, warmup_steps=0)
        small = online.LEARNING._replace(model=replace(online.LEARNING.model, **sizes), train=quick, slot_bits=8)
        patch.setattr(online, "LEARNING", small)
        Path("text").write_bytes(TEXT)
        build = Vocab.build
        patch.setattr(Vocab, "build", lambda unit, *given, **k: build(unit, *given, **k | {"closed": unit == "byte"}))
        for name, recipe, seed in (("run", "text-small", 1), ("other", "text-small", 2), ("words", "text-words", 1)):
            seeded = ["--train.seed", str(seed)]
            assert main(["train", recipe, "--data", "text", "--out", name, *SMALL, *seeded]) == 0
        yield folder


@pytest.fixture(scope="module")
def archive(home: Path) -> bytes:
    return archive_of("text", ["--learn"], "kept.txlz")


def archive_of(file: str, how: list[str], name: str) -> bytes:
    """An archive of coded blocks."""
    assert main(["compress", file, *how, "--output", name, "--force"]) == 0
    content = Path(name).read_bytes()
    assert not any(block.code.raw for block in Archive(io.BytesIO(content), name).blocks())
    return content


def with_model(how: list[str]) -> list[str]:
    """The options of decompress for an archive that was made with these."""
    return [] if how == ["--learn"] else how


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    before = sorted(Path().iterdir())
    assert main(arguments) == 2
    shown = capsys.readouterr()
    sentences = [line for line in shown.err.splitlines() if "block" not in line or line.startswith("txl:")]
    assert all(line.startswith("txl: ") and line.endswith(".") for line in sentences), shown.err
    assert shown.out == "" and sorted(Path().iterdir()) == before
    return " ".join(sentences)


@HOW
@pytest.mark.parametrize(
    "text",
    [b"", b"x", b"a" * 1100, TEXT[:499], TEXT, bytes(range(256)) * 5, random.Random(0).randbytes(1100)],
    ids=["empty", "one byte", "one byte repeated", "a block", "blocks", "all bytes", "noise"],
)
def test_a_file_comes_back(home, how, text, capsys):
    Path("file").write_bytes(text)
    assert main(["compress", "file", *how, "--json", "--force", "--threads", "1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    archive = Path("file.txlz").read_bytes()
    assert facts["bytes"] == len(text) and facts["archive_bytes"] == len(archive) < len(text) + 800
    Path("file").unlink()
    assert main(["decompress", "file.txlz", *with_model(how), "--json"]) == 0
    assert Path("file").read_bytes() == text
    assert json.loads(capsys.readouterr().out)["archive_bytes"] == len(archive)


def test_bytes_that_the_model_lacks_are_coded(home):
    Path("strange").write_bytes(TEXT + b"z\xff\0" + TEXT)
    archive_of("strange", ["--model", "run"], "lacking.txlz")
    assert main(["decompress", "lacking.txlz", "--model", "run"]) == 0
    assert Path("lacking").read_bytes() == Path("strange").read_bytes()


def piped(content: bytes, arguments: list[str], patch: pytest.MonkeyPatch, capture: Any) -> tuple[int, bytes]:
    """The exit status and the output of a command that reads `content` from standard input."""
    patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    capture.readouterr()
    status = main(arguments)
    sys.stdout.flush()
    return status, capture.readouterr().out


@HOW
def test_pipes(home, how, monkeypatch, capfdbinary):
    status, archive = piped(TEXT, ["compress", "-", *how], monkeypatch, capfdbinary)
    assert status == 0
    assert piped(archive, ["decompress", "-", *with_model(how)], monkeypatch, capfdbinary) == (0, TEXT)


@pytest.mark.skipif(not all(map(shutil.which, ("bash", "cat", "cmp"))), reason="needs bash, cat and cmp")
def test_pipes_of_a_shell(home):
    txl = f"{sys.executable} -m transformer_xl"
    line = f"cat {home}/text | {txl} compress --learn - | {txl} decompress - | cmp - {home}/text"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_full_disk(home, monkeypatch, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, limits[1]))
        assert "large could not be written" in refused(["compress", "text", "--learn", "--output", "large"], capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["compress", "text", "--learn", "--output", "-"]) == 2
    assert capsys.readouterr().err.endswith("txl: standard output: No space left on device.\n")


def test_what_is_not_there_or_too_much_is_refused(home, archive, capsys):
    assert "--model RUN or --learn" in refused(["compress", "text"], capsys)
    assert "not both" in refused(["compress", "text", "--learn", "--model", "run"], capsys)
    assert "no file nothing" in refused(["compress", "nothing", "--learn"], capsys)
    assert "no file run" in refused(["compress", "run", "--learn"], capsys)
    assert "kept.txlz exists" in refused(["compress", "text", "--learn", "--output", "kept.txlz"], capsys)
    assert "--rows must be at least 1" in refused(["compress", "text", "--learn", "--rows", "0"], capsys)
    assert "reads bytes" in refused(["compress", "text", "--model", "words"], capsys)
    assert "name the file to write" in refused(["decompress", "text"], capsys)
    assert "must be an archive" in refused(["decompress", "text", "--output", "new"], capsys)
    assert "text exists" in refused(["decompress", "kept.txlz", "--output", "text"], capsys)
    assert "needs no model" in refused(["decompress", "kept.txlz", "--output", "new", "--model", "run"], capsys)


def test_another_model_is_refused(home, capsys):
    assert main(["compress", "text", "--model", "run", "--output", "modelled.txlz"]) == 0
    assert "made with another model" in refused(["decompress", "modelled.txlz", "--model", "other"], capsys)
    assert "name its run by --model" in refused(["decompress", "modelled.txlz"], capsys)


def damaged_archives(archive: bytes, count: int) -> Iterator[bytes]:
    """Truncated ones, and ones with a flipped bit."""
    dice = random.Random(0)
    for at in (dice.randrange(len(archive)) for _ in range(count // 2)):
        yield archive[:at]
        yield archive[:at] + bytes([archive[at] ^ 1 << dice.randrange(8)]) + archive[at + 1 :]


@HOW
def test_damaged_archives_are_refused(home, how, capsys):
    archive = archive_of("text", how, "whole.txlz")
    for damaged in damaged_archives(archive, 200):
        Path("damaged.txlz").write_bytes(damaged)
        said = refused(["decompress", "damaged.txlz", *with_model(how)], capsys)
        assert said.count("txl: ") == 1


def test_of_damaged_archives_a_pipe_gets_whole_blocks(home, archive, monkeypatch, capfdbinary):
    for damaged in damaged_archives(archive, 8):
        status, text = piped(damaged, ["decompress", "-"], monkeypatch, capfdbinary)
        assert status == 2 and TEXT.startswith(text) and (text == TEXT or len(text) % journey.BLOCK == 0)


def rewritten(archive: bytes, **changes: object) -> bytes:
    """The same archive with another header and right checksums."""
    read, stream = Archive(io.BytesIO(archive), "archive"), io.BytesIO()
    writer = Writer(stream, replace(read.header, **changes))
    length = 0
    for block in read.blocks():
        writer.block(TEXT[length : length + block.length], block.code)
        length += block.length
    writer.end()
    return stream.getvalue()


def test_a_machine_that_computes_otherwise_is_refused(home, archive, capsys):
    header: Header = Archive(io.BytesIO(archive), "archive").header
    assert rewritten(archive) == archive
    others = [{"machine": header.machine | {name: "another"}} for name in header.machine]
    others += [{"test": "0" * 64}, {"learner": "0"}, {"machine": {}}, {"rows": header.rows + 1}]
    for changes in others:
        Path("foreign.txlz").write_bytes(rewritten(archive, **changes))
        said = refused(["decompress", "foreign.txlz"], capsys)
        assert "learner" in said or "arithmetic" in said


def test_threads_are_those_of_the_header(home, archive, monkeypatch):
    seen = []
    monkeypatch.setattr(journey, "_repeat", lambda *_: seen.append(torch.get_num_threads()) or 1 / 0)
    Path("threads.txlz").write_bytes(rewritten(archive, threads=3))
    with pytest.raises(ZeroDivisionError):
        main(["decompress", "threads.txlz"])
    assert seen == [3] and torch.get_num_threads() != 3


def test_other_bits_in_the_middle_write_nothing(home, archive, capsys, monkeypatch):
    """The self-test may pass where a later block differs."""
    exact = online.OnlinePredictor._learn

    def inexact(self: online.OnlinePredictor) -> None:
        exact(self)
        if self.steps == 30:  # later than the self-test
            with torch.no_grad():
                self.model.softmax.bias[ord("a")] += 1

    monkeypatch.setattr(online.OnlinePredictor, "_learn", inexact)
    assert "arithmetic" in refused(["decompress", "kept.txlz", "--output", "new"], capsys)


def test_constant_memory(home):
    """A text of many blocks takes no more memory than one of a few."""
    program = """
import resource, sys
from transformer_xl.cli.journeys import compress
from transformer_xl.cli.main import main
compress.BLOCK = 1 << 14
class Zeros:
    left = int(sys.argv[2])
    def read(self, count):
        count = min(count, self.left)
        self.left -= count
        return bytes(count)
sys.stdin = type("In", (), {"buffer": Zeros()})
run, archive = sys.argv[1] + "/run", sys.argv[1] + "/" + sys.argv[2]
assert main(["compress", "-", "--model", run, "--rows", "256", "--output", archive]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    peaks = []
    for blocks in (1, 10):
        done = subprocess.run(
            [sys.executable, "-c", program, str(home), str(blocks << 14)], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] < peaks[0] + 10_000


def test_a_wrong_version_of_the_format_is_refused(home, archive, capsys):
    Path("newer.txlz").write_bytes(MAGIC + b"\x09" + archive[len(MAGIC) + 1 :])
    assert "version 9" in refused(["decompress", "newer.txlz"], capsys)
    packed = zlib.compress(b"[" * 9000)
    odd = archive[: len(MAGIC) + 1] + len(packed).to_bytes(4, "little") + packed
    Path("odd.txlz").write_bytes(odd + zlib.crc32(odd).to_bytes(4, "little"))
    assert "header" in refused(["decompress", "odd.txlz"], capsys)
