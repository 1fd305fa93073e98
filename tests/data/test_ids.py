"""Streams of token ids from `.npy` and `.bin` files, and documents from `.jsonl` files."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.config.settings import CorpusConfig, Unit
from transformer_xl.data.corpus import Corpus
from transformer_xl.data.datasets import open_corpus
from transformer_xl.data.ids import MOST_IDS
from transformer_xl.data.reading import Span, documents
from transformer_xl.data.vocab import Vocab
from transformer_xl.mistake import Mistake

SPLITS = ("train", "valid", "test")
LLM_C = (20240520, 20240801)
DTYPES = ("int8", "uint8", "int16", ">i2", "uint16", "int32", "int64", "uint64")
dtypes = st.sampled_from([*DTYPES, *LLM_C, "bin"])
texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), min_size=1, max_size=20)


def opened(path: Path, vocab: Vocab | None = None, **how: Any) -> Corpus:
    return open_corpus(CorpusConfig(name=str(path), unit="id"), vocab, **how)


def joined(corpus: Corpus) -> list[int]:
    return np.concatenate([corpus.split(name).ids for name in SPLITS]).tolist()


class Trap:
    """An object that writes a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def saved(save: Callable[..., None], *arrays: np.ndarray, **named: np.ndarray) -> bytes:
    """What NumPy writes for these arrays."""
    content = io.BytesIO()
    save(content, *arrays, **named)
    return content.getvalue()


def npy_header(text: bytes) -> bytes:
    """A file of NumPy, which reads this text as Python."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def llm_c(magic: int, ids: Any) -> bytes:
    """A file as https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py writes it."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, 7 if magic == 20240801 else 1, len(ids)
    return header.tobytes() + np.array(ids, "<u4" if magic == 20240801 else "<u2").tobytes()


MEGATRON = {1: "u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def write_megatron(file: Path, texts: list[list[int]], code: int) -> Path:
    """The two files of Megatron's IndexedDatasetBuilder, each document as one sequence."""
    kind = np.dtype(MEGATRON[code])
    np.concatenate(texts).astype(kind).tofile(file)
    sizes = np.array([len(each) for each in texts], "<i4")
    offsets = (np.cumsum(sizes) - sizes).astype("<i8") * kind.itemsize
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(texts), len(texts) + 1)
    firsts = np.arange(len(texts) + 1, dtype="<i8")
    file.with_suffix(".idx").write_bytes(head + sizes.tobytes() + offsets.tobytes() + firsts.tobytes())
    return file


PACKED = saved(np.savez_compressed, ids=np.arange(500))


class TestFiles:
    @given(ids=st.lists(st.integers(0, 100), min_size=40, max_size=300), dtype=dtypes)
    def test_a_file_is_cut_and_nothing_is_lost(self, tmp_path_factory: pytest.TempPathFactory, ids, dtype) -> None:
        file = tmp_path_factory.getbasetemp() / f"ids.{'npy' if dtype in DTYPES else 'bin'}"
        if dtype in LLM_C:
            file.write_bytes(llm_c(dtype, ids))
        elif dtype == "bin":
            np.array(ids, "<u2").tofile(file)
            file.with_suffix(".json").write_text('{"dtype": "uint16"}')  # small ids may be wide ones, too
        else:
            np.save(file, np.array(ids, dtype))
        corpus = opened(file)
        assert joined(corpus) == ids and corpus.vocab == Vocab.of_ids(max(ids) + 1)
        sizes = [corpus.header.splits[name].tokens for name in SPLITS]
        cuts = [len(ids) * share // 20 for share in (0, 18, 19, 20)]
        assert sizes == np.diff(cuts).tolist()
        whole = opened(file, Vocab.of_ids(300), whole=True)
        assert whole.split("all").ids.tolist() == ids and whole.header.dtype == "<u2"

    def test_the_vocabulary_covers_all_splits_or_is_the_given_one(self, tmp_path: Path) -> None:
        for name, largest in {"train": 5, "val": 9, "test": 3}.items():
            np.save(tmp_path / f"{name}.npy", np.arange(largest + 1))
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
        corpus = opened(tmp_path)
        assert len(corpus.vocab) == 10 and not (tmp_path / "sprung").exists()
        assert corpus.notes[1] == "Left out: meta.pkl (no ids)."
        assert len(opened(tmp_path, Vocab.of_ids(50_304)).vocab) == 50_304
        with pytest.raises(Mistake, match=r"val\.npy must hold ids from 0 to 8, .* got 9 as number 9 from 0"):
            opened(tmp_path, Vocab.of_ids(9))
        (tmp_path / "more.bin").write_bytes(bytes(98))
        with pytest.raises(Mistake, match=r"files of one format, got more\.bin and val\.npy"):
            opened(tmp_path)

    @pytest.mark.parametrize(
        ("name", "content", "sentence"),
        [
            ("a.npy", np.zeros(99), "one dimension, or two, .*; got 1 dimensions of float64"),
            ("a.npy", np.zeros((9, 9, 9), int), "one dimension, or two, .*; got 3 dimensions of int64"),
            ("a.npy", np.array([-1, *range(98)]), "ids from 0 to 1,048,575, .* got -1 as number 0 from 0"),
            ("a.npy", np.array([*range(98), MOST_IDS]), "got 1048576 as number 98 from 0"),
            ("a.npy", b"\x93NUMPY\x01\x00", "cannot be read as .npy"),
            ("a.npy", saved(np.save, np.arange(9_999))[:-1], "cannot be read as .npy"),
            ("a.npy", b"", "has nothing for the train split: it is empty"),
            ("a.bin", b"", "has nothing for the train split: it is empty"),
            ("a.bin", bytes(99), "uint16 ids, of 2 bytes each, and has 99 bytes"),
            ("a.bin", np.array([70_000, 5, 6], "<u4").tobytes(), "may hold uint16 ids or wider ones"),
            ("a.bin", (np.arange(5000, dtype="<u4") * 25 % 100_000).tobytes(), "may hold uint16 ids or wider ones"),
            ("a.bin", llm_c(20240520, range(50))[:-1], "must hold 50 ids, as its header says, and has 1,123 bytes"),
            ("a.bin", llm_c(20240801, range(50)) + b"12", "must hold 50 ids, as its header says, and has 1,226 bytes"),
            ("a.bin", np.array([20240520, 1, -5], "<i4").tobytes(), "must hold -5 ids, as its header says"),
            ("a.npz", b"PK\3\4", "cannot be read as .npz"),
            ("a.npz", PACKED[:45] + bytes(15) + PACKED[60:], "cannot be read as .npz: Error -3"),
            ("a.npz", PACKED.replace(b"\x08\x00", b"\x63\x00"), "cannot be read as .npz: That compr"),
            ("a.npy", npy_header(b"{'descr': '<i8\n"), "cannot be read as .npy"),
            (
                "a.npy",
                npy_header(b"{'descr': ',', 'fortran_order': False, 'shape': (5,)}\n"),
                "cannot be read as .npy: invalid",
            ),
            ("a.npz", saved(np.savez, one=np.arange(50), two=np.arange(50)), "must hold one array .*, and holds 2"),
            ("a.npz", saved(np.savez, one=np.array([{}])), "cannot be read as .npz"),
            ("a.json", b'{"ids": [1, true, 3]}', "must hold lists of integers, got"),
            ("a.json", b'{"ids": "1 2 3"}', 'line 1, must be an object with a list "ids", "input_ids" or "tokens"'),
            ("a.json", b'{"ids": [1, [2, 3]]}', "must hold lists of integers"),
            ("a.json", b"[" * 100_000, "line 1, must be JSON"),
            ("a.jsonl", b'{"ids": [1, 2]}\n{"ids": [3', "line 2, must be JSON"),
            ("a.jsonl", b'{"ids": [1, 99999999999999999999]}', "must hold lists of integers"),
            ("a.npy", 2 * saved(np.save, np.arange(50)), "must end with its array, and has 528 bytes more"),
            ("a.txt", b"1 2 3", "file, because the tokens are ids"),
        ],
    )
    def test_a_file_without_ids_is_refused(self, tmp_path: Path, name: str, content, sentence: str) -> None:
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            np.save(tmp_path / name, content)
        with pytest.raises(Mistake, match=f"{name}.*{sentence}") as error:
            opened(tmp_path / name)
        assert "\n" not in str(error.value)

    def test_each_file_of_a_folder_may_be_a_document(self, tmp_path: Path) -> None:
        for number in range(9):
            folder = tmp_path / "ids" / ("train" if number < 6 else "valid" if number < 8 else "test")
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / f"{number}.npy", np.full(number + 2, number))
        corpus = open_corpus(CorpusConfig(name=str(tmp_path / "ids"), unit="id", reset_documents=True))
        starts = corpus.split("train").documents
        assert starts is not None and starts.tolist() == [0, 2, 5, 9, 14, 20]
        assert corpus.split("train").ids[starts].tolist() == [0, 1, 2, 3, 4, 5]

    def test_documents_that_change_are_read_again(self, tmp_path: Path) -> None:
        """The ids are the same; only what the index says is not."""
        ids = np.arange(1200).reshape(-1, 30)
        for size in (1, 2):
            file = write_megatron(tmp_path / "a.bin", ids.reshape(-1, 30 * size).tolist(), 8)
            corpus = opened(file)
            assert sum(len(corpus.split(name).documents) for name in SPLITS) == 40 // size

    @pytest.mark.parametrize("at", [0, 9, 17, 18, 26, 34, -1])
    def test_an_index_that_disagrees_is_refused(self, tmp_path: Path, at: int) -> None:
        file = write_megatron(tmp_path / "a.bin", [[1, 2, 3]] * 40, 8)
        index = bytearray(file.with_suffix(".idx").read_bytes())
        index[at] ^= 1
        for content in (bytes(index), bytes(index)[:30], bytes(index) + b"1"):
            file.with_suffix(".idx").write_bytes(content)
            with pytest.raises(Mistake, match=r"a\.idx must (be|describe)"):
                opened(file)
        os.truncate(write_megatron(file, [[1, 2, 3]] * 40, 8), 200)
        with pytest.raises(Mistake, match=r"a\.idx must describe"):
            opened(file)

    @pytest.mark.parametrize("beside", ["a.json", "meta.json"])
    def test_a_word_beside_a_file_gives_its_type(self, tmp_path: Path, beside: str) -> None:
        ids = [70_000, 5, 6] * 30
        np.array(ids, "<u4").tofile(tmp_path / "a.bin")
        (tmp_path / beside).write_text('{"dtype": "uint32"}')
        assert joined(opened(tmp_path / "a.bin")) == joined(opened(tmp_path)) == ids
        (tmp_path / beside).unlink()
        (tmp_path / "a.bin").rename(tmp_path / "train.bin")
        (tmp_path / "val.bin").write_bytes((tmp_path / "train.bin").read_bytes())
        for word, first in {"uint32": [70_000, 5], "uint16": [4464, 1]}.items():  # the same files, other ids
            (tmp_path / "meta.json").write_text(json.dumps({"dtype": word}))
            assert opened(tmp_path, Vocab.of_ids(70_001)).split("train").ids[:2].tolist() == first
        (tmp_path / "val.bin").unlink()
        (tmp_path / "train.bin").rename(tmp_path / "a.bin")
        (tmp_path / beside).write_text('{"dtype": "float32"}')
        with pytest.raises(Mistake, match=r'must have a "dtype" of uint8, uint16, .*, got \'float32\''):
            opened(tmp_path / "a.bin")

    def test_a_large_file_of_json_is_not_read(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").touch()
        os.truncate(tmp_path / "a.json", 1 << 33)
        with pytest.raises(Mistake, match=r"a\.json must be at most 67,108,864 bytes"):
            opened(tmp_path / "a.json")

    @pytest.mark.parametrize("kind", ["npy", "npz", "MidiTok", "tracks", "lines", "lines of input_ids", *MEGATRON])
    def test_rows_and_lists_are_documents(self, tmp_path: Path, kind: str | int) -> None:
        rows = np.arange(400).reshape(40, 10) % 127  # which fits each type of Megatron's
        lists = [row.tolist() for row in rows]
        contents = {
            "npy": ("a.npy", saved(np.save, rows)),
            "npz": ("a.npz", saved(np.savez, ids=rows)),
            "MidiTok": ("a.json", json.dumps({"ids": lists, "ids_encoded": False}).encode()),
            "tracks": ("a.json", json.dumps({"tokens": lists}).encode()),
            "lines": ("a.jsonl", "".join(json.dumps({"ids": each}) + "\n" for each in lists).encode()),
            "lines of input_ids": ("a.jsonl", "\n".join(json.dumps({"input_ids": each}) for each in lists).encode()),
        }
        name, content = contents.get(kind, ("a.bin", b""))
        (tmp_path / name).write_bytes(content)
        if kind in MEGATRON:
            write_megatron(tmp_path / name, lists, kind)
        corpus = opened(tmp_path / name)
        assert joined(corpus) == rows.flatten().tolist()
        starts = [corpus.split(name).documents for name in SPLITS]
        assert [each.tolist() for each in starts] == [[*range(0, len(corpus.split(n).ids), 10)] for n in SPLITS]


class TestVocab:
    @given(ids=st.lists(st.integers(0, 299), max_size=20))
    def test_the_text_of_ids_is_their_numbers(self, ids: list[int]) -> None:
        vocab = Vocab.of_ids(300)
        text = " ".join(map(str, ids))
        assert vocab.decode(ids) == text and vocab.decode_bytes(ids) == text.encode()
        assert vocab.encode(text).tolist() == vocab.encode(text.replace(" ", "\n ").encode()).tolist() == ids
        assert vocab.token_sizes() is None and vocab.line_end is None and vocab.is_text and str(vocab) == "300 ids"

    @pytest.mark.parametrize("word", ["300", "-1", "1.5", "x", "007", "9" * 5000, "\u0663"])
    def test_a_word_that_is_no_id_is_refused(self, word: str) -> None:
        with pytest.raises(Mistake, match=r"id 1 of the text from 0, is not in the vocabulary \(300 ids\)"):
            Vocab.of_ids(300).encode(f"7 {word} 8")


class TestJsonLines:
    @given(written=texts, unit=st.sampled_from(["byte", "char", "word"]), packed=st.booleans(), data=st.data())
    def test_each_line_is_a_document_with_its_own_text(self, tmp_path_factory, written, unit, packed, data) -> None:
        written = [*written, "the last ones"]
        lines = [json.dumps(data.draw(st.sampled_from([text, {"text": text, "id": 7}]))) for text in written]
        ends = [data.draw(st.sampled_from(["\n", "\r\n", "\n \n"])) for _ in lines]
        content = "".join(line + end for line, end in zip(lines, ends, strict=True)).encode()
        file = tmp_path_factory.mktemp("lines") / ("a.jsonl.gz" if packed else "a.jsonl")
        file.write_bytes(gzip.compress(content) if packed else content)
        assert list(documents(Span(file))) == [text.encode() for text in written]
        corpus = open_corpus(CorpusConfig(name=str(file)), Vocab.build(unit, written), whole=True)
        split = corpus.split("all")
        assert split.documents is not None
        found = [corpus.vocab.decode(part) for part in np.split(split.ids, split.documents[1:])]
        if unit == "word":
            assert [text.split() for text in found] == [text.split() for text in written if text]
        else:
            assert found == [text for text in written if text]

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("{", "Expecting property name"),
            ("null", "it has no text"),
            ('{"text": ["a"]}', "it has no text"),
            ('{"ids": [5]}', "it has no text, but a list. If that is of token ids, give --corpus.unit id"),
            ("[5, 6]", "it has no text, but a list"),
            (r'"\ud800"', "surrogates not allowed"),
            ("[" * 100_000, "(recursion|Stack overflow)"),
            ("9" * 9_999, "digits"),
        ],
    )
    def test_a_line_without_text_is_named(self, tmp_path: Path, line: str, reason: str) -> None:
        (tmp_path / "a.jsonl").write_text(f'"one"\n\n{line}\n"four"\n')
        with pytest.raises(Mistake, match=rf'a\.jsonl, line 3, must be a JSON string .*"text": .*{reason}.*column'):
            open_corpus(tmp_path / "a.jsonl")

    def test_other_texts_beside_lines_are_refused_but_for_a_readme(self, tmp_path: Path) -> None:
        for name in ("train.jsonl", "val.jsonl", "test.jsonl"):
            (tmp_path / name).write_text('"one"\n"two"\n')
        (tmp_path / "README.md").write_text("About them.")
        corpus = open_corpus(tmp_path)
        assert {split.tokens for split in corpus.header.splits.values()} == {6}
        assert corpus.notes[1] == "Left out: README.md (no lines or rows)."
        (tmp_path / "more.txt").write_text("text")
        with pytest.raises(Mistake, match=r"files of one format, got .*more\.txt"):
            open_corpus(tmp_path)


@pytest.mark.parametrize("unit", ["id", "byte"])
def test_a_large_file_stays_on_disk(tmp_path: Path, unit: Unit) -> None:
    file = tmp_path / ("large.npy" if unit == "id" else "large.txt")
    if unit == "id":
        np.save(file, np.resize(np.arange(65, dtype=np.uint16), 1 << 24))
    else:
        file.write_bytes(b"a line of text\n" * (1 << 21))
    tracemalloc.start()
    try:
        corpus = open_corpus(CorpusConfig(name=str(file), unit=unit))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(split.tokens for split in corpus.header.splits.values()) == (1 << 24 if unit == "id" else 15 << 21)
    assert peak < file.stat().st_size / 2
