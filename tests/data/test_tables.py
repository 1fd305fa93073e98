"""Texts in columns of tables: each row is a document."""

from __future__ import annotations

import gzip
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import csv, ipc, parquet

from transformer_xl.config.settings import CorpusConfig
from transformer_xl.data.corpus import Corpus
from transformer_xl.data.datasets import open_corpus
from transformer_xl.mistake import Mistake

SPLITS = ("train", "valid", "test")
TEXTS = [f'row {n}, "\u00e9" {"x" * (n % 7)}\nand a line' for n in range(60)]
TABLE = pyarrow.table({"id": range(60), "text": TEXTS, "title": [f"title {n}" for n in range(60)]})


def opened(path: Path, column: str = "", **how: Any) -> Corpus:
    return open_corpus(CorpusConfig(name=str(path), column=column, **how))


def write_arrow(table: Any, file: Path, opened: Any = ipc.new_stream) -> None:
    with opened(file, table.schema) as out:
        out.write_table(table, max_chunksize=7)


def write_tsv(table: Any, file: Path) -> None:
    csv.write_csv(table, file, csv.WriteOptions(delimiter="\t"))


def write_lines(table: Any, file: Path) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


WRITERS: dict[str, Any] = {
    "a.parquet": lambda table, file: parquet.write_table(table, file, row_group_size=7),
    "file/a.arrow": partial(write_arrow, opened=ipc.new_file),
    "stream/a.arrow": write_arrow,
    "a.csv": csv.write_csv,
    "a.tsv": write_tsv,
    "a.jsonl": write_lines,
}


def written(name: str, tmp_path: Path, table: Any = TABLE) -> Path:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    WRITERS[name](table, file)
    return file


@pytest.mark.parametrize("column", ["", "text", "title"])
@pytest.mark.parametrize("name", WRITERS)
def test_each_row_is_a_document(name: str, column: str, tmp_path: Path) -> None:
    if not column and name in ("a.csv", "a.tsv"):
        pytest.skip("these are tables only where a column is named")
    corpus = opened(written(name, tmp_path), column, reset_documents=column == "text")  # they are documents anyway
    rows: list[str] = []
    for split in map(corpus.split, SPLITS):
        ends = [*split.documents[1:].tolist(), len(split.ids)]
        rows += [bytes(split.ids[a:b]).decode() for a, b in zip(split.documents.tolist(), ends, strict=True)]
    assert rows == TABLE[column or "text"].to_pylist()
    assert [len(corpus.split(split).documents) for split in SPLITS] == pytest.approx([54, 3, 3], abs=1)


@pytest.mark.parametrize("unit", ["char", "word", "bpe"])
def test_a_table_has_the_tokens_of_its_lines(unit: Any, tmp_path: Path) -> None:
    many = pyarrow.concat_tables([TABLE] * 9)
    of_table, of_lines = (
        opened(written(name, tmp_path, many), unit=unit, bpe_size=300) for name in ("a.parquet", "a.jsonl")
    )
    assert of_table.vocab.symbols and set(of_table.vocab.symbols) == set(of_lines.vocab.symbols)
    assert sum(split.tokens for split in of_table.header.splits.values()) > 1000


@pytest.mark.parametrize("name", ["a.parquet", "file/a.arrow"])
def test_texts_in_a_dictionary_are_texts_and_lists_of_texts_are_not(name: str, tmp_path: Path) -> None:
    table = pyarrow.table({"tags": [["a", "b"]] * 60, "title": TABLE["text"].dictionary_encode()})
    assert opened(written(name, tmp_path, table)).split("all").ids.tobytes() == "".join(TEXTS).encode()
    with pytest.raises(Mistake, match='must have a column of texts "tags"'):
        opened(tmp_path / name, "tags")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_line_end_in_a_text_may_be_anywhere(name: str, tmp_path: Path) -> None:
    """pyarrow reads a megabyte at a time. White space at the ends stays, too."""
    texts = [f" row {n}\n" + "line\n" * 9999 + " " for n in range(60)]
    split = opened(written(name, tmp_path, pyarrow.table({"text": texts})), "text").split("all")
    assert split.ids.tobytes() == "".join(texts).encode() and len(split.documents) == 60


def test_a_column_is_refused_where_there_is_none(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.csv.gz", "wb") as out:
        out.write(written("a.csv", tmp_path).read_bytes())
    with pytest.raises(Mistake, match=r"corpus\.column must be left out for .*gz, which has no table"):
        opened(tmp_path / "a.csv.gz", "text")
    (tmp_path / "words").write_text("row\n")
    with pytest.raises(Mistake, match=r"corpus\.column must be left out"):
        opened(tmp_path / "a.csv.gz", "text", unit="word", vocab=str(tmp_path / "words"))
    store = opened(tmp_path / "a.csv", "text").path
    with pytest.raises(Mistake, match=r"corpus\.column must be .* tokenised already"):
        opened(store, "text")


def test_without_a_column_commas_are_text(tmp_path: Path) -> None:
    file = written("a.csv", tmp_path)
    assert bytes(opened(file).split("train").ids[:9]) == file.read_bytes()[:9]


def test_a_dataset_on_disk_has_its_splits(tmp_path: Path) -> None:
    """As `save_to_disk` of Hugging Face's datasets writes it: shards in folders, each a stream."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    for split, shards in {"train": 2, "validation": 1}.items():
        folder = tmp_path / "data" / split
        folder.mkdir()
        for name in ("dataset_info.json", "state.json"):
            (folder / name).write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
        for shard in range(shards):
            write_arrow(TABLE.slice(30 * shard, 30), folder / f"data-{shard:05}-of-{shards:05}.arrow")
        write_arrow(TABLE, folder / "cache-1234.arrow")
    corpus = opened(tmp_path / "data")
    assert [corpus.header.splits[split].tokens for split in ("train", "valid")] == [
        sum(len(text.encode()) for text in texts) for texts in (TEXTS, TEXTS[:30])
    ]
    assert any("beside the data of a dataset" in note for note in corpus.notes)
    with pytest.raises(Mistake, match=r"-00001\.arrow \(no ids\), .*_info\.json \(beside the data of a dataset\)"):
        open_corpus(CorpusConfig(name=str(tmp_path / "data/validation"), unit="id"))


def test_rows_without_a_text_are_left_out(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a" * 9, None, "", "b" * 9] * 15})
    corpus = opened(written("a.parquet", tmp_path, table))
    assert sum(len(corpus.split(split).documents) for split in SPLITS) == 30


def test_a_column_that_is_none_is_refused(tmp_path: Path) -> None:
    two = pyarrow.table({"a": TEXTS, "b": TEXTS, "n": range(60)})
    for name in ("a.parquet", "file/a.arrow", "stream/a.arrow"):
        file = written(name, tmp_path, two)
        with pytest.raises(Mistake, match=r'a column of texts "text", or only one; .* a \(string\), b .*, n .*\. Name'):
            opened(file)
        with pytest.raises(Mistake, match=r'must have a column of texts "n"; its columns are .*, n \(int64\)'):
            opened(file, "n")
    with pytest.raises(Mistake, match=r"a\.csv cannot be read as .csv: .*none"):
        opened(written("a.csv", tmp_path, two), "none")
    with pytest.raises(Mistake, match=r'line 1, must be a JSON string or an object with a string "none"'):
        opened(written("a.jsonl", tmp_path, two), "none")


@pytest.mark.parametrize("name", ["a.parquet", "file/a.arrow", "stream/a.arrow"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_cut_table_is_refused(name: str, share: float, tmp_path: Path) -> None:
    file = written(name, tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(Mistake, match=r"a\.(parquet|arrow) cannot be read as ") as error:
        opened(file)
    assert "\n" not in str(error.value)


def test_without_pyarrow_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written("a.parquet", tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Mistake, match=r"needs pyarrow.*pip install pyarrow"):
        opened(file)


def test_a_table_that_unpacks_to_much_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.runtime.files.UNPACKED", 10**6)
    monkeypatch.setattr("transformer_xl.runtime.files.RATIO", 1)
    parquet.write_table(pyarrow.table({"text": ["a" * 10_000] * 1000}), tmp_path / "a.parquet")
    with pytest.raises(Mistake, match=r"a\.parquet unpacks to more than 1,000,000 bytes"):
        open_corpus(CorpusConfig(name=str(tmp_path / "a.parquet")))
