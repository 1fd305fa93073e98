"""Thirty damaged files of each format: each is read, or refused in one sentence that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from token_files import llm_c, write_megatron

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import csv, ipc, parquet  # noqa: E402

from transformer_xl.config.settings import CorpusConfig  # noqa: E402
from transformer_xl.data.datasets import open_corpus  # noqa: E402
from transformer_xl.data.vocab import Unit  # noqa: E402
from transformer_xl.mistake import Mistake  # noqa: E402

IDS = np.random.default_rng(0).integers(0, 50, 900)
TABLE = pyarrow.table({"text": [f"the {n} cats sat on a mat" for n in range(90)], "n": list(range(90))})


def arrow(file: Path) -> None:
    with pyarrow.OSFile(str(file), "wb") as sink, ipc.new_file(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)


def tokenizer_lines(file: Path) -> None:
    file.write_text("".join(json.dumps({"ids": IDS[n : n + 10].tolist()}) + "\n" for n in range(0, 900, 10)))


WRITERS: dict[str, tuple[Unit, Callable[[Path], object]]] = {
    "a.npy": ("id", lambda file: np.save(file, IDS.reshape(90, 10))),
    "a.npz": ("id", lambda file: np.savez(file, IDS)),
    "megatron.bin": ("id", lambda file: write_megatron(file, IDS.reshape(90, 10).tolist(), 8)),
    "llm.bin": ("id", lambda file: file.write_bytes(llm_c(20240520, IDS))),
    "ids.jsonl": ("id", tokenizer_lines),
    "a.parquet": ("byte", lambda file: parquet.write_table(TABLE, file)),
    "a.arrow": ("byte", arrow),
    "a.csv": ("byte", lambda file: csv.write_csv(TABLE, file)),
    "a.jsonl": (
        "byte",
        lambda file: file.write_text("".join(f'{{"text": "{t}"}}\n' for t in TABLE["text"].to_pylist())),
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_damaged_file_is_read_or_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit, write = WRITERS[name]
    file, random = tmp_path / name, np.random.default_rng(1)
    write(file)
    config = CorpusConfig(name=str(file), unit=unit, column="text" if name == "a.csv" else "")
    assert open_corpus(config).split("train").ids.size > 100
    refused = 0
    for number in range(30):
        write(file)
        damaged = file.with_suffix(".idx") if name.startswith("megatron") and number % 2 else file
        content = bytearray(damaged.read_bytes())
        if number < 10:
            del content[int(random.integers(len(content))) :]
        elif number < 25:
            for index in random.integers(0, min(len(content), 300), 3):
                content[index] = int(random.integers(256))
        else:
            content[10:10] = bytes(int(random.integers(1, 99)))
        damaged.write_bytes(content)
        try:
            open_corpus(config).split("train")
        except (Mistake, OSError) as error:
            refused += 1
            assert len(str(error).splitlines()) == 1 and str(tmp_path / name.partition(".")[0]) in str(error), error
    assert refused >= 5
