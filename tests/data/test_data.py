"""Vocabularies, token stores, published corpora and any other text."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import shutil
import threading
import time
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server import serving
from tiny_runs import TINY, printed, refused

from transformer_xl.commands.main import main
from transformer_xl.config.settings import CorpusConfig, Newlines
from transformer_xl.data import corpus as corpus_module
from transformer_xl.data import reading
from transformer_xl.data.corpora.preparing import prepare
from transformer_xl.data.corpora.published import DATASETS, Dataset, DownloadSource, _protocol
from transformer_xl.data.corpus import SPLITS, Corpus
from transformer_xl.data.datasets import open_corpus
from transformer_xl.data.reading import OPENERS, chunks, pieces, read_file
from transformer_xl.data.subwords import Subwords, train_bpe
from transformer_xl.data.texts import read_splits
from transformer_xl.data.vocab import EOS, UNK, Vocab
from transformer_xl.mistake import Mistake

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the corpora are not here")
UNITS = ("byte", "char", "word")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text("ab \n\u00e9\u2028", max_size=60)
splits = {"train": b"a b\n\nb c\n", "valid": b"a b\n", "test": b"b c\n"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TXL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def put(folder: Path, files: Mapping[str, bytes]) -> Path:
    """The folder, with these files below it."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("how", ["overwritten", "grown", "replaced"])
@pytest.mark.parametrize("unit", ["byte", "word"])
def test_a_text_that_changes_while_it_is_prepared_leaves_no_store(how, unit, tmp_path, home, monkeypatch) -> None:
    """The digest names the store and is taken first, so the store of other content would serve this text for good."""
    file, text = tmp_path / "text.txt", b"one two three\n" * 2000
    file.write_bytes(text)
    time.sleep(0.02)  # clocks of file systems are coarse
    before, write = file.stat(), corpus_module._write_ids

    def changing(*arguments: Any) -> Any:
        if how == "replaced":
            (tmp_path / "other").write_bytes(text[::-1])
            (tmp_path / "other").replace(file)
        else:
            file.write_bytes(text + text if how == "grown" else text.upper())
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        return write(*arguments)

    config = CorpusConfig(name=str(file), unit=unit)
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "_write_ids", changing)
        with pytest.raises(Mistake, match=r"text\.txt changed while it was read\. Run this again"):
            open_corpus(config)
    assert not list((home / "texts").glob("[!.]*"))
    file.write_bytes(text)
    found = open_corpus(config)
    assert found.header.splits["train"].bytes == pytest.approx(0.9 * len(text), rel=0.01)


CONTAINERS = {
    "a.pq": b"PAR1\x15\x04\x15",
    "a.png": b"\x89PNG\r\n\x1a\n\0\0",
    "a.pkl": pickle.dumps(["a text"] * 99),
    "gz.txt": gzip.compress(b"a text"),
    "bz2.txt": bz2.compress(b"a text"),
    "xz.txt": lzma.compress(b"a text"),
    "a.pdf": b"%PDF-1.7\n" + b"a text\n" * 99,
    "a.json": json.dumps({"ids": [[4, 189, 95] * 99], "ids_encoded": False}).encode(),
}


@pytest.mark.parametrize("unit", ["byte", "word"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_is_not_trained_on_as_text(name: str, unit: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(CONTAINERS[name] * 9)
    with pytest.raises(Mistake, match=rf"{name} must be text, and is ") as alone:
        open_corpus(CorpusConfig(name=str(tmp_path / name), unit=unit))
    assert name.startswith("a.") or "give it the suffix of its format (.gz, .xz" in str(alone.value)
    kind = str(alone.value).partition(", and is ")[2].partition(". Write")[0]
    (tmp_path / "b.txt").write_bytes(b"a text of words\n" * 99)
    corpus = open_corpus(CorpusConfig(name=str(tmp_path), unit=unit))
    assert any(f"Left out: {name} ({kind})." in note for note in corpus.notes)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.xz", "a.txt.bz2", "a.jsonl.gz"])
def test_a_packed_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("transformer_xl.runtime.files.UNPACKED", 10**6)
    file = tmp_path / name
    with reading.OPENERS[file.suffix](file, "wb") as opened:
        opened.write(b'"' + b"a" * 2 * 10**6 + b'"')
    with pytest.raises(Mistake, match="unpacks to more than 1,000,000 bytes"):
        open_corpus(CorpusConfig(name=str(file)))


@pytest.mark.parametrize(("name", "unit"), [("a.jsonl", "byte"), ("a.txt", "word")])
def test_an_endless_line_or_word_is_refused(tmp_path, monkeypatch, name, unit) -> None:
    monkeypatch.setattr(reading, "LONGEST", 10**6)
    (tmp_path / name).write_text('"' + "a" * 2 * 10**6 + '"\n')
    with pytest.raises(Mistake, match="of more than 1,000,000 bytes"):
        list(reading.pieces(reading.Span(tmp_path / name), unit))


def test_documents_are_not_reset_in_one_stream(tmp_path: Path) -> None:
    put(tmp_path, dict.fromkeys(("train.txt", "valid.txt", "test.txt"), b"a text of words\n" * 99))
    config = CorpusConfig(name=str(tmp_path), reset_documents=True)
    with pytest.raises(Mistake, match=r"corpus\.reset_documents must be false for .*, which is one document a split"):
        open_corpus(config)
    (tmp_path / "train-2.txt").write_bytes(b"a text of words\n" * 99)
    assert open_corpus(config).header.splits["train"].documents == [0, 1584]
    assert open_corpus(CorpusConfig(name=str(tmp_path))).split("train").documents is None


def test_a_model_of_documents_scores_one_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`txl eval` has no option by which the settings of the training text could be left out."""
    put(tmp_path, {f"{number}.txt": b"a text of words\n" * 99 for number in range(9)})
    run, other = tmp_path / "run", tmp_path / "8.txt"
    reset, train = ["--corpus.reset-documents", "true"], ["train", "text-small", *TINY]
    assert main([*train, "--data", str(tmp_path), *reset, "--out", str(run)]) == 0
    printed(["eval", str(run), "--data", str(other)], capsys)
    printed(["eval", str(run), "--data", str(other), "--split", "valid"], capsys)
    again = [*train, "--data", str(other), "--init", str(run), "--out", f"{run}2"]
    assert "corpus.reset_documents must be false" in refused([*again, *reset], capsys)
    assert "corpus.column must be left out" in refused([*again, "--corpus.column", "a"], capsys)


class TestVocab:
    @given(data=st.binary(max_size=80), closed=st.booleans())
    def test_bytes_are_restored(self, data: bytes, closed: bool) -> None:
        vocab = Vocab.build("byte", [data], closed=closed)
        assert vocab.decode_bytes(vocab.encode(data)) == data
        dropping = Vocab.build("byte", [data], newlines="drop", closed=closed)
        assert dropping.decode_bytes(dropping.encode(data)) == data.replace(b"\n", b"")
        assert set(dropping.symbols) == set(vocab.symbols) - {10}

    @given(text=texts, closed=st.booleans())
    def test_characters_are_restored(self, text: str, closed: bool) -> None:
        vocab = Vocab.build("char", [text], closed=closed)
        assert vocab.decode(vocab.encode(text)) == text
        assert len(vocab.encode(text)) == len(text)
        assert vocab.token_sizes()[vocab.encode(text)].sum() == len(text.encode())

    @given(lines=st.lists(st.lists(st.sampled_from(["the", "cat", "\u00e9t\u00e9", "<unk>"]), max_size=4), max_size=6))
    def test_words_are_restored(self, lines: list[list[str]]) -> None:
        text = "\n".join(" ".join(line) for line in lines)
        vocab = Vocab.build("word", [text])
        ids = vocab.encode(text)
        assert vocab.decode(ids) == text
        assert len(ids) == sum(map(len, lines)) + max(len(lines) - 1, 0)
        assert vocab.decode(vocab.encode(" " + text.replace(" ", "  ") + "\t")) == text
        for cut in range(len(ids)):
            assert text.startswith(vocab.decode(ids[:cut]))

    @given(text=texts, size=st.integers(1, 9), unit=st.sampled_from(UNITS))
    def test_pieces_have_the_tokens_of_the_whole(self, text: str, size: int, unit) -> None:
        raw = text.encode()
        vocab = Vocab.build(unit, [text])
        parts = [vocab.encode(piece) for piece in pieces(raw, unit, size)]
        whole = text + "\n" if unit == "word" and text and not text.endswith("\n") else text
        assert np.concatenate([[], *parts]).tolist() == vocab.encode(whole).tolist()

    def test_order_is_by_frequency_then_first_occurrence(self) -> None:
        assert Vocab.build("word", ["b a\nc a\n", "d c\n"]).symbols == (EOS, "a", "c", "b", "d", UNK)
        assert Vocab.build("char", ["cbbaab"]).symbols == ("b", "a", "c", UNK)
        assert Vocab.build("byte", [b"cb", b"baab"], closed=True).symbols == tuple(b"bac")
        assert Vocab.build("byte", [b"cab"], closed=True).symbols == tuple(b"cab")
        assert Vocab.build("byte", [b"ba"]).symbols == tuple(range(256))
        assert Vocab.build("word", ["b a\nc a\n"], closed=True, newlines="drop").symbols == ("a", "b", "c")

    def test_unk_counts_as_often_as_all_rare_words(self) -> None:
        assert Vocab.build("word", ["a a b c d"], min_count=2).symbols == (EOS, UNK, "a")
        vocab = Vocab.build("char", ["aabcd"], min_count=2)
        assert vocab.symbols == ("a", UNK)
        assert vocab.decode(vocab.encode("axa")) == "a\ufffda"

    def test_size_decides_the_type(self) -> None:
        for size, dtype in ((256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.int32)):
            vocab = Vocab("word", tuple(map(str, range(size))))
            ids = vocab.encode(f"0 {size - 1}")
            assert ids.dtype == dtype and ids.tolist() == [0, size - 1]

    @pytest.mark.parametrize(("unit", "text"), [("byte", b"aba?a"), ("char", "aba?a"), ("word", "a b a ? a")])
    def test_a_token_without_an_id_is_named_with_its_position(self, unit, text: str | bytes) -> None:
        vocab = Vocab.build(unit, ["a b" if unit == "word" else b"ab" if unit == "byte" else "ab"], closed=True)
        with pytest.raises(ValueError, match=r"'\?', \w+ 3 of the text"):
            vocab.encode(text)
        with pytest.raises(ValueError, match=r"'\?', \w+ 13 of the text"):
            vocab.encode(text, start=10)

    def test_bytes_of_a_word_include_the_space_after_it(self) -> None:
        vocab = Vocab.build("word", ["\u00e9t\u00e9 a\n"])
        assert vocab.token_sizes().tolist() == [1, 6, 2, 6]
        assert Vocab.build("byte", []).token_sizes().sum() == 256
        assert (vocab.token_sizes(3)[3], vocab.token_sizes()[3]) == (0, 6), "a mark of documents is no text"
        assert Vocab.build("char", ["\u00e9"]).token_sizes().tolist() == [2, 1]

    @pytest.mark.parametrize("unit", UNITS)
    def test_json_holds_the_whole_vocabulary(self, unit) -> None:
        vocab = Vocab.build(unit, ["b a\n\u00e9"], newlines="drop")
        again = Vocab.from_json(json.loads(json.dumps(vocab.to_json())))
        assert again == vocab and again.fingerprint == vocab.fingerprint
        other = Vocab.build(unit, ["b a\n\u00e9"])
        assert other != vocab and other.fingerprint != vocab.fingerprint

    @pytest.mark.parametrize(
        "wrong",
        [
            {"unit": "sound"},
            {"symbols": [1, 1]},
            {"symbols": [300]},
            {"symbols": []},
            {"newlines": "x"},
            {"symbols": 3},
            {"unit": "id", "symbols": ["1", "0"]},
            {"unit": "id", "symbols": ["0", "2"]},
            {"unit": "id", "symbols": [0, 1]},
            {"unit": "bpe", "symbols": ["a"]},
        ],
    )
    def test_damaged_json_is_refused(self, wrong: dict) -> None:
        with pytest.raises(ValueError, match=r"vocab\.json"):
            Vocab.from_json({"unit": "byte", "newlines": "keep", "symbols": [1, 2]} | wrong)

    def test_bytes_of_a_command_line_are_kept(self) -> None:
        vocab = Vocab.build("byte", [])
        assert vocab.decode_bytes(vocab.encode(os.fsdecode(b"a\xff"))) == b"a\xff"
        assert vocab.decode(vocab.encode(b"a\xff")) == "a\ufffd"


class TestCorpus:
    @pytest.mark.parametrize("newlines", get_args(Newlines))
    def test_a_store_has_the_words_that_were_counted_in_the_training_split(self, tmp_path: Path, newlines) -> None:
        texts = {"train": [b"c a b\na a\n", b"d d\n"], "valid": [b"e b b b\n"], "test": [b"a f\n"]}
        how: Any = {"newlines": newlines, "min_count": 2}
        corpus = Corpus.build(tmp_path / "store", texts, CorpusConfig(unit="word", **how))
        assert corpus.vocab == Vocab.build("word", texts["train"], **how)
        for split, found in texts.items():
            ids = np.concatenate([corpus.vocab.opening_ids, *map(corpus.vocab.encode, found)])
            stored, header = corpus.split(split), corpus.header.splits[split]
            assert stored.ids.tolist() == ids.tolist() and isinstance(stored.ids, np.memmap)
            assert stored.ids.dtype == np.uint8 and stored.documents is None and stored.name == split
            assert (header.tokens, header.bytes) == (len(ids), len(b"".join(found)))
            assert (header.types, header.unknown) == (len({*ids}), int((ids == corpus.vocab.unk).sum()))
        files = {path.name for path in (tmp_path / "store").iterdir()}
        assert files == {"corpus.json", "vocab.json", "train.bin", "valid.bin", "test.bin"}

    def test_a_given_vocabulary_is_used(self, tmp_path: Path) -> None:
        vocab = Vocab.build("word", ["c b"], newlines="drop")
        corpus = Corpus.build(tmp_path / "store", {"test": splits["test"]}, vocab=vocab)
        assert corpus.vocab == vocab and corpus.split("test").ids.tolist() == [1, 0]
        with pytest.raises(ValueError, match=r"no valid split, only test"):
            corpus.split("valid")
        with pytest.raises(ValueError, match="must have a train split"):
            Corpus.build(tmp_path / "other", {"test": splits["test"]})

    @pytest.mark.parametrize(
        ("file", "content", "sentence"),
        [
            ("train.bin", b"\0", "but its header says"),
            ("corpus.json", b"{", "is damaged"),
            ("corpus.json", b"[]", "is damaged"),
            ("corpus.json", b"{}", "is not a transformer-xl token store of version 4"),
            ("corpus.json", b'{"format": "transformer-xl token store", "version": 3}', "is not a transformer-xl token"),
            ("corpus.json", b'{"format": "other", "version": 4}', "is not a transformer-xl token store"),
            ("corpus.json", b'{"format": "transformer-xl token store", "version": 4}', "is damaged"),
            ("vocab.json", b'{"unit": "byte", "newlines": "keep", "symbols": [1]}', "is not the vocabulary"),
        ],
    )
    def test_damaged_stores_are_refused(self, tmp_path, file, content, sentence, monkeypatch) -> None:
        store = Corpus.build(tmp_path / "store", splits).path
        (store / file).write_bytes(content)
        with pytest.raises(ValueError, match=sentence):
            Corpus.open(store)
        assert Corpus.build(store, splits, reuse=True).split("train").ids.size == 9
        monkeypatch.setattr(corpus_module.files, "wait_for", None)  # of a folder that may only be read
        assert Corpus.build(store, splits, reuse=True).split("train").ids.size == 9

    def test_the_checksum_finds_changes_that_keep_the_size(self, tmp_path: Path) -> None:
        store = Corpus.build(tmp_path / "store", splits).path
        (store / "train.bin").write_bytes(bytes(9))
        Corpus.open(store)
        with pytest.raises(ValueError, match="SHA-256"):
            Corpus.open(store).split("train")
        assert Corpus.build(store, splits, reuse=True).split("train").ids.any()
        (store / "test.bin").write_bytes(bytes(4))
        assert Corpus.build(store, splits, reuse=True).split("test").ids.any()

    def test_a_full_disk_leaves_the_old_store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = Corpus.build(tmp_path / "store", splits).path

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"store could not be written: No space left on device\. Free some space"):
            Corpus.build(store, splits | {"train": b"other text"})
        assert len(Corpus.open(store).split("all").ids) == 17
        assert {p.name for p in tmp_path.iterdir()} == {"store", ".store.lock"}

    @pytest.mark.parametrize(("reuse", "times"), [(False, 3), (True, 1)])
    def test_a_store_is_made_by_one_process_at_a_time(self, tmp_path: Path, reuse, times, monkeypatch) -> None:
        written, write = [], corpus_module._write_ids

        def slow(file: Path, *others: Any) -> Any:
            written.append(file.parent)
            time.sleep(0.05)
            return write(file, *others)

        monkeypatch.setattr(corpus_module, "_write_ids", slow)
        build = partial(Corpus.build, tmp_path / "store", splits, reuse=reuse)
        threads = [threading.Thread(target=build) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [len({*written[begin : begin + 3]}) for begin in range(0, len(written), 3)] == [1] * times
        assert len(build().split("all").ids) == 17 and not [*tmp_path.glob(".tmp-*")]

    def test_a_store_replaces_a_store_and_nothing_else(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="There is no token store"):
            Corpus.open(tmp_path / "store")
        Corpus.build(tmp_path / "store", splits)
        assert Corpus.build(tmp_path / "store", splits | {"train": b"xyz"}).header.splits["train"].tokens == 3
        mine = put(tmp_path / "mine", {"thesis.txt": b""})
        with pytest.raises(ValueError, match="is not a token store"):
            Corpus.build(mine, splits)
        assert (mine / "thesis.txt").exists()

    def test_ids_that_were_read_are_of_their_own_store_and_not_pickled(self, tmp_path: Path) -> None:
        corpus, other = (Corpus.build(tmp_path / name, splits | {"train": name.encode() * 999}) for name in "ab")
        assert bytes(corpus.split("train").ids) == b"a" * 999
        assert bytes(replace(corpus, path=other.path, header=other.header).split("train").ids) == b"b" * 999
        small = pickle.dumps(Corpus.open(corpus.path))
        assert pickle.dumps(corpus) == small and pickle.loads(small).split("train").ids.filename is not None

    def test_a_split_has_at_least_one_target(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="valid split of store must have at least 2 tokens"):
            Corpus.build(tmp_path / "store", splits | {"valid": b"a"})
        assert not (tmp_path / "store").exists()


def texts_of(path: Path, unit, **how) -> dict[str, list[bytes]]:
    """The texts of each split, read."""
    found = read_splits(path, unit, **how).splits
    return {split: [b"".join(chunks(text)) for text in texts] for split, texts in found.items()}


class TestAnyText:
    @given(text=texts, unit=st.sampled_from(UNITS))
    def test_cutting_a_file_loses_nothing(self, tmp_path_factory: pytest.TempPathFactory, text: str, unit) -> None:
        file = tmp_path_factory.getbasetemp() / "cut.txt"
        text = (text.replace("\0", "").replace("\ufeff", "") + " ") * 100 + "\n"
        file.write_bytes(text.encode())
        found = texts_of(file, unit)
        parts = {split: b"".join(texts) for split, texts in found.items()}
        assert parts["train"] + parts["valid"] + parts["test"] == text.encode()
        if unit == "char":
            assert "".join(part.decode() for part in parts.values()) == text
        if unit == "word":
            assert [word for part in parts.values() for word in part.decode().split()] == text.split()
        if unit != "byte":
            file.write_bytes(b"\xef\xbb\xbf" + text.encode())
            assert texts_of(file, unit) == found, "a byte order mark moved a cut"

    def test_words_are_cut_after_lines_unless_lines_are_long_and_else_at_white_space(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"word word\n" * 95)
        assert all(b"".join(texts).endswith(b"\n") for texts in texts_of(tmp_path / "a.txt", "word").values())
        (tmp_path / "a.txt").write_bytes(b"word " * 195 + b"\nword\n")
        assert len(texts_of(tmp_path / "a.txt", "word")["valid"][0].split()) == 10
        (tmp_path / "a.txt").write_bytes(b"one\ttwo\t" * 50)
        words = [len(texts[0].split()) for texts in texts_of(tmp_path / "a.txt", "word").values()]
        assert sum(words) == 100 and min(words) >= 4, "no word is cut"
        (tmp_path / "a.txt").write_text("語" * 100)
        with pytest.raises(ValueError, match="too short to be cut between documents, words"):
            texts_of(tmp_path / "a.txt", "word")

    @pytest.mark.parametrize(
        "names",
        [
            "train.txt val.txt test.txt",
            "train.txt dev.txt test.txt",
            "train-00001-of-00002.txt train-00002-of-00002.txt validation.txt test.txt",
            "train/a.txt train/b.txt valid/c.txt test/d.txt",
            "own/training/a.txt own/development/c.txt own/testing/d.txt",
            "wiki-train/a.txt wiki-dev/b.txt wiki-test/c.txt",
            "training-data/train/a.txt training-data/dev/b.txt training-data/test/c.txt",
            "corpus.train corpus.valid corpus.test",
            "train.en valid.en test.en",
            "my_train.txt my_dev.txt my_test.txt",
            "x.train.txt validation.txt test.md",
            "train.txt val.txt test.txt | poems.txt to-train-your-dragon.txt contest.txt tests.txt train.py test.py",
        ],
    )
    def test_the_usual_names_name_splits(self, tmp_path: Path, names: str) -> None:
        """The test split must not train the model: a file is in the split that it names, and in no other.

        Those after a bar name none, although words of splits are parts of their names.
        """
        put(tmp_path, {name: f"{name} ".encode() * 30 for name in names.replace("|", "").split()})
        texts = texts_of(tmp_path, "byte")
        assert texts.keys() == {"train", "valid", "test"}
        spelt = {"train": "train", "val": "valid", "dev": "valid", "test": "test"}
        for split, found in texts.items():
            own = [name for name in names.partition("|")[0].split() if spelt[max(spelt, key=name.rfind)] == split]
            assert found == [f"{name} ".encode() * 30 for name in own] and own

    def test_a_folder_without_a_valid_split_takes_it_from_train(self, tmp_path: Path) -> None:
        put(tmp_path, {"train.txt": b"r" * 190 + b"v" * 10, "test.txt": b"t" * 50, "README.md": b"no"})
        texts = read_splits(tmp_path, "byte")
        assert texts_of(tmp_path, "byte") == {"train": [b"r" * 190], "valid": [b"v" * 10], "test": [b"t" * 50]}
        assert texts.notes == [
            "train, valid: train.txt; test: test.txt; valid is the last 5 % of train, as no file names it.",
            "Left out: README.md (names no split).",
        ]

    @pytest.mark.parametrize("suffix", [".txt", ".zip"])
    def test_a_name_may_be_as_long_as_the_disk_allows(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / ("\u540d" * 83 + suffix)
        path.write_bytes(b"abc\n" * 99)
        if suffix == ".zip":
            with zipfile.ZipFile(path, "w") as packed:
                packed.writestr("a.txt", b"abc\n" * 99)
        assert open_corpus(path).name == path.name

    def test_notes_name_files_outside_utf8_and_links_to_folders(self, tmp_path: Path) -> None:
        (tmp_path / "text").mkdir()
        (tmp_path / "text" / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"text")
        (tmp_path / "text" / "more").symlink_to(tmp_path, target_is_directory=True)
        notes = read_splits(tmp_path / "text", "byte", whole=True).notes
        assert notes == ["all: caf\\udce9.txt.", "Left out: more (a link to a folder)."]

    def test_a_folder_of_train_files_alone_is_cut_with_or_without_a_readme(self, tmp_path: Path) -> None:
        (tmp_path / "train.txt").write_bytes(b"r" * 180 + b"v" * 10 + b"t" * 10)
        alone = texts_of(tmp_path, "byte")
        assert alone == {"train": [b"r" * 180], "valid": [b"v" * 10], "test": [b"t" * 10]}
        (tmp_path / "README.md").write_bytes(b"no")
        assert texts_of(tmp_path, "byte") == alone
        assert read_splits(tmp_path, "byte", whole=True).splits.keys() == {"all"}
        assert len(open_corpus(str(tmp_path), whole=True).split("all").ids) == 200

    @pytest.mark.parametrize(
        ("names", "sentence"),
        [
            ("test.txt poems.txt", r"test\.txt names one, but not poems\.txt"),
            ("train.txt test.txt poems.txt", r"train\.txt names one, but not poems\.txt"),
            ("train.txt poems.txt", r"train\.txt names one, but not poems\.txt"),
            ("a.txt b.txt test/c.txt", r"test/c\.txt names one, but not a\.txt, b\.txt"),
            ("train.test.txt a.txt", r"train\.test\.txt names test and train"),
        ],
    )
    def test_a_folder_that_names_splits_for_some_files_is_refused(self, tmp_path, names, sentence) -> None:
        put(tmp_path, dict.fromkeys(names.split(), b"text " * 30))
        with pytest.raises(ValueError, match=sentence):
            read_splits(tmp_path, "byte")

    def test_runs_stores_and_binary_files_are_left_out_with_a_note(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "arrays.npz", np.zeros(9))
        for kind, marks in {"run": ("config.toml", "environment.json"), "store": ("corpus.json", "vocab.json")}.items():
            put(tmp_path / kind, dict.fromkeys((*marks, "log.txt", "inner/text.txt"), b"not a text"))
        put(tmp_path, {"a.txt": b"text " * 40, "empty.txt": b""})
        texts = read_splits(tmp_path, "byte")
        assert b"".join(chain(*texts_of(tmp_path, "byte").values())) == b"text " * 40
        assert texts.notes[1:] == [
            "Left out: arrays.npz (binary), run (written by txl), store (written by txl), empty.txt (empty)."
        ]

    @pytest.mark.parametrize("kind", ["zip", "tar", "gztar"])
    def test_an_archive_is_the_folder_that_was_packed_and_leaves_none(self, tmp_path: Path, home: Path, kind) -> None:
        """Nor does one that a killed process unpacked stay."""
        names = ("train/a.txt", "valid/b.txt", "test/c.txt")
        folder = put(tmp_path / "texts", {"logo.png": b"\0"} | {name: name.encode() * 20 for name in names})
        archive = shutil.make_archive(str(folder), kind, tmp_path, "texts")
        (home / f".tmp-{Path(archive).name}-abcdefgh" / "texts").mkdir(parents=True)
        found, packed = open_corpus(CorpusConfig(name=str(folder))), open_corpus(CorpusConfig(name=archive))
        assert all((found.split(split).ids == packed.split(split).ids).all() for split in SPLITS)
        assert "Left out: texts/logo.png (binary)." in packed.notes and not [*home.glob(".tmp-*")]

    @pytest.mark.parametrize("start", [b"BZh", b"BZh91AY", b"PK", b"\x1f"])
    def test_a_text_that_begins_like_an_archive_is_a_text(self, tmp_path: Path, start: bytes) -> None:
        (tmp_path / "a.txt").write_bytes(start + b" is a text" * 40)
        corpus = open_corpus(CorpusConfig(name=str(tmp_path / "a.txt")))
        assert corpus.vocab.decode_bytes(corpus.split("train").ids).startswith(start + b" is a text")

    def test_a_folder_may_hold_a_test_split_only(self, tmp_path: Path) -> None:
        (tmp_path / "test.txt").write_bytes(b"b a")
        corpus = open_corpus(CorpusConfig(name=str(tmp_path)), Vocab.build("word", ["a b"]))
        assert corpus.split("test").ids.tolist() == [2, 1, 0]

    def test_files_are_joined_in_order_and_hidden_ones_left_out(self, tmp_path: Path) -> None:
        names = ("b/c", "a", "b/.git/x", ".hidden", "z")
        put(tmp_path, {"empty": b""} | {name: f"{name} ".encode() * 40 for name in names})
        os.mkfifo(tmp_path / "pipe")
        parts = read_splits(tmp_path, "word").splits
        glued = b"".join(b"".join(pieces(text, "word")) for texts in parts.values() for text in texts)
        assert glued.split() == [b"a"] * 40 + [b"b/c"] * 40 + [b"z"] * 40
        assert b"a \nb/c" in glued and b"b/c \nz" in glued, "no line runs on into the next file"

    def test_a_changed_file_is_tokenised_again(self, tmp_path: Path) -> None:
        file, config = tmp_path / "a.txt", CorpusConfig(name=str(tmp_path / "a.txt"))
        file.write_bytes(b"a" * 100)
        first = open_corpus(config)
        written = (first.path / "train.bin").stat().st_mtime_ns
        assert open_corpus(config).path == first.path
        assert (first.path / "train.bin").stat().st_mtime_ns == written
        file.write_bytes(b"b" * 100)
        assert open_corpus(config).split("train").ids[0] == ord("b") and first.split("train").ids[0] == ord("a")
        assert open_corpus(CorpusConfig(name=str(file), unit="char")).vocab.unit == "char"
        assert first.name == "a.txt"
        (tmp_path / "a.log").write_bytes(b"b" * 100)
        again = open_corpus(str(tmp_path / "a.log"))
        assert again.name == "a.log"
        assert again.path == open_corpus(str(file)).path, "they have one store"

    @pytest.mark.parametrize("suffix", ["xz", "gz", "bz2"])
    def test_compressed_text_is_text(self, tmp_path: Path, suffix: str) -> None:
        file = tmp_path / f"a.txt.{suffix}"
        with OPENERS[f".{suffix}"](file, "wb") as out:
            out.write(b"abc" * 100)
        assert texts_of(file, "char")["train"] == [b"abc" * 90]
        file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises((ValueError, OSError), match=r"a\.txt"):
            texts_of(file, "char")

    def test_a_cut_may_fall_on_the_line_end_that_a_file_lacks(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(json.dumps("x " * 44 + "x"))
        (tmp_path / "b.jsonl").write_text('"b c d e"\n')
        assert [(tmp_path / name).stat().st_size for name in ("a.jsonl", "b.jsonl")] == [91, 10]
        with pytest.raises(Mistake, match="nothing for the test split"):
            read_splits(tmp_path, "word")

    @pytest.mark.parametrize("unit", ["char", "word"])
    @pytest.mark.parametrize("content", [b"abc\0def", b"ab\xff", b"ab\xc3"])
    def test_binary_files_are_refused(self, tmp_path: Path, unit, content: bytes) -> None:
        (tmp_path / "image.png").write_bytes(content)
        with pytest.raises(ValueError, match=r"image\.png must be UTF-8 text "):
            open_corpus(CorpusConfig(name=str(tmp_path / "image.png"), unit=unit))

    @pytest.mark.parametrize(
        ("name", "error", "sentence"),
        [
            ("short.txt", ValueError, "nothing for the valid split: it is empty, or too short"),
            ("folder", ValueError, "nothing for the train split"),
            ("", ValueError, "it is empty"),
            ("enwiki8", FileNotFoundError, "Did you mean enwik8"),
        ],
    )
    def test_a_users_mistake_gets_a_sentence(self, own_folder, name, error, sentence) -> None:
        Path("short.txt").write_text("abc")
        Path("folder").mkdir()
        with pytest.raises(error, match=sentence):
            open_corpus(CorpusConfig(name=name))


def digest(text: bytes) -> str:
    return "sha256:" + hashlib.sha256(text).hexdigest()


class TestPublished:
    """`prepare` on corpora of a few bytes that have every property of real ones."""

    TEXT = b"ab\nb" * 5

    @pytest.fixture
    def tiny(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """One file to cut, in two protocols, the second with wrong counts."""
        known = Dataset(
            unit="byte",
            files={"tiny": digest(self.TEXT)},
            downloads=(),
            protocols={
                "drop": _protocol(2, (8, 2, 0), (3, 2, 0), (4, 2, 0)),
                "keep": _protocol(4, (10, 3, 0), (5, 7, 0), (6, 3, 1)),
            },
            cuts=(10, 15),
        )
        monkeypatch.setitem(DATASETS, "tiny", known)
        return put(tmp_path / "source", {"tiny.xz": lzma.compress(self.TEXT)})

    @pytest.fixture
    def words(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Two training files, one for validation and test, and a vocabulary that counts lines as sentences."""
        files = {"a.1": b"the cat sat\nthe dog\n", "a.2": b"a dog\n", "b": b"the bird sat\n"}
        files["list"] = b"the 3\n<S> 2\ndog 2\n"
        known = Dataset(
            unit="word",
            files={name: digest(text) for name, text in files.items()},
            downloads=(),
            protocols={"sentence": _protocol(4, (11, 4, 3), (5, 3, 2), (5, 3, 2))},
            splits={"train": ("a.1", "a.2"), "valid": ("b",), "test": ("b",)},
            vocab_file="list",
        )
        monkeypatch.setitem(DATASETS, "words", known)
        return put(tmp_path / "words", files)

    def test_each_treatment_of_line_ends_is_a_store(self, tiny: Path, home: Path) -> None:
        config = CorpusConfig(name="tiny", newlines="drop")
        with pytest.raises(FileNotFoundError, match="run `txl data tiny`, with --source PATH for a local copy"):
            open_corpus(config)
        assert prepare("tiny", tiny / "tiny.xz").path == home / "corpora" / "tiny"
        assert open_corpus("tiny").vocab.newlines == "drop", "a name opens it as it is"
        with pytest.raises(FileNotFoundError, match="run `txl data tiny --newlines keep`"):
            open_corpus("tiny", Vocab.build("byte", []))  # or as a model reads it
        with pytest.raises(FileNotFoundError, match="run `txl data tiny --newlines keep`"):
            open_corpus(CorpusConfig(name="tiny"))
        corpus = open_corpus(config)
        assert corpus.vocab.symbols == tuple(b"ba")
        assert corpus.vocab.decode(corpus.split("valid").ids) == "bab"

    def test_other_content_and_other_counts_are_refused(self, tiny: Path, home: Path, monkeypatch) -> None:
        wrong = "3 entries of the vocabulary, not 4; 3 types in valid, not 7; 5 tokens in test, not 6; 0 unknown"
        with pytest.raises(ValueError, match=rf"{wrong} in test, not 1\. Its files"):
            prepare("tiny", tiny, newlines="keep")
        assert not (home / "corpora" / "tiny-keep").exists()
        before = prepare("tiny", tiny)
        known = DATASETS["tiny"]
        monkeypatch.setitem(DATASETS, "tiny", replace(known, protocols={"drop": known.protocols["keep"]}))
        with pytest.raises(ValueError, match="has 2 entries of the vocabulary, not 4"):
            prepare("tiny", tiny)
        assert len(Corpus.open(before.path).split("all").ids) == 15, "the good store stays"
        monkeypatch.setitem(DATASETS, "tiny", known)
        (tiny / "tiny").write_bytes(b"something else")
        with pytest.raises(ValueError, match="is not the published tiny: its content has SHA256"):
            prepare("tiny", tiny)
        (tiny / "tiny").write_bytes(self.TEXT * 2)
        with pytest.raises(ValueError, match="is not the published tiny"):
            prepare("tiny", tiny)
        with pytest.raises(FileNotFoundError, match="nowhere is missing, a pipe or a device"):
            prepare("tiny", tiny / "nowhere")
        with pytest.raises(ValueError, match=r"one of enwik8, .* got 'text9'\. Did you mean text8"):
            prepare("text9", tiny)
        with pytest.raises(ValueError, match=r"--newlines \(corpus\.newlines\) must be 'keep' for ptb"):
            prepare("ptb", tiny, newlines="drop")

    def test_a_folder_with_a_damaged_file_or_without_it_is_refused(self, tiny: Path) -> None:
        (tiny / "tiny.xz").write_bytes(lzma.compress(self.TEXT)[:-9])
        with pytest.raises(ValueError, match=rf"^{tiny}/tiny\.xz cannot be read as"):
            prepare("tiny", tiny)
        (tiny / "tiny.xz").unlink()
        with pytest.raises(FileNotFoundError, match=r"must hold tiny, and lacks tiny\. Give a whole copy, leave out"):
            prepare("tiny", tiny)

    def test_the_wrong_unit_or_vocabulary_is_refused(self, tiny: Path) -> None:
        path = str(prepare("tiny", tiny).path)
        for name in ("tiny", path):
            with pytest.raises(ValueError, match=r'corpus\.unit must be "byte"'):
                open_corpus(CorpusConfig(name=name, unit="char", newlines="drop"))
            with pytest.raises(ValueError, match=r"\(256 bytes, newlines kept\) is not that of .*\(2 bytes"):
                open_corpus(CorpusConfig(name=name, newlines="drop"), Vocab.build("byte", []))
            with pytest.raises(ValueError, match=r"corpus\.vocab must be .* tokenised already"):
                open_corpus(CorpusConfig(name=name, newlines="drop", vocab="words.txt"))
            assert open_corpus(CorpusConfig(name=name, newlines="drop")).name == "tiny"
        with pytest.raises(ValueError, match=r'corpus\.newlines must be "drop"'):
            open_corpus(CorpusConfig(name=path))

    def test_tokens_in_another_order_get_the_ids_of_the_other_vocabulary(self, tiny: Path) -> None:
        own = open_corpus(CorpusConfig(name=str(prepare("tiny", tiny).path), newlines="drop"))
        other = replace(own.vocab, symbols=own.vocab.symbols[::-1])
        found = open_corpus(CorpusConfig(name="tiny", newlines="drop"), other)
        for split in SPLITS:
            ids = found.split(split).ids
            assert other.decode(ids) == own.vocab.decode(own.split(split).ids)
            assert (found.in_vocabulary(own.vocab).split(split).ids == own.split(split).ids).all()
            assert (ids == len(other) - 1 - own.split(split).ids.astype(int)).all()

    def test_a_models_line_ends_do_not_select_a_corpus(self, tiny: Path, monkeypatch) -> None:
        prepare("tiny", tiny)
        known = DATASETS["tiny"]
        monkeypatch.setitem(DATASETS, "tiny", replace(known, protocols={"drop": known.protocols["drop"]}))
        with pytest.raises(ValueError, match="is not that of the corpus tiny"):
            open_corpus(CorpusConfig(name="tiny", newlines="keep"), Vocab.build("byte", []))

    def test_sentences_are_between_their_marks(self, words: Path) -> None:
        corpus = prepare("words", words)
        assert corpus.vocab.symbols == ("<unk>", "the", "<S>", "dog")
        assert corpus.split("train").ids.tolist() == [2, 1, 0, 0, 2, 1, 3, 2, 0, 3, 2]
        assert corpus.split("valid").ids.tolist() == [2, 1, 0, 0, 2]
        assert corpus.vocab.opening_ids.tolist() == [2] and corpus.vocab.line_end == 2
        assert corpus.vocab.decode(corpus.split("train").ids[1:]) == "the <unk> <unk>\nthe dog\n<unk> dog\n"

    def test_published_spelling_becomes_plain_text(self, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        spelled = b"a b _ c \n "
        known = DATASETS["ptb-char"]
        files = dict.fromkeys(known.files, digest(spelled))
        protocol = _protocol(5, *[(5, 5, 0)] * 3)
        monkeypatch.setitem(DATASETS, "ptb-char", replace(known, files=files, protocols={"keep": protocol}))
        corpus = prepare("ptb-char", put(tiny, dict.fromkeys(files, spelled)))
        assert corpus.vocab.decode(corpus.split("test").ids) == "ab c\n"

    def test_a_file_without_a_digest_must_be_text_to_its_end(self, words: Path, monkeypatch) -> None:
        known = DATASETS["words"]
        monkeypatch.setitem(DATASETS, "words", replace(known, files=known.files | {"a.1": ""}))
        for content in (b"\xff cat\n", "caf\u00e9".encode()[:-1]):
            (words / "a.1").write_bytes(content)
            with pytest.raises(ValueError, match=r"words is not the published one: it is not UTF-8 text"):
                prepare("words", words)


class TestDownloaded:
    """A published corpus from a server that misbehaves."""

    def test_the_second_address_serves_where_the_first_fails(self, home: Path, tmp_path: Path, monkeypatch) -> None:
        text = TestPublished.TEXT
        monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)  # no pauses between tries
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("folder/tiny", text)
            archive.writestr("../../evil", b"evil")
        with serving() as server:
            script = server.put("tiny.zip", packed.getvalue())
            there = DownloadSource(server.url("tiny.zip"), len(packed.getvalue()), digest(packed.getvalue()))
            origins = DownloadSource(server.url("gone.zip")), there
            known = Dataset("byte", {"tiny": digest(text)}, (origins,), {"drop": {}}, cuts=(10, 15))
            monkeypatch.setitem(DATASETS, "tiny", known)
            threads = [threading.Thread(target=prepare, args=["tiny"]) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(script.requests) == 1, "the second process waits for the first"
            assert prepare("tiny").path == home / "corpora" / "tiny"
        assert prepare("tiny").name == "tiny", "the second time there is no server"
        assert {path.name for path in (home / "downloads" / "tiny").iterdir() if path.suffix == ".zip"} == {"tiny.zip"}
        assert not list(tmp_path.rglob("*evil*")) and not list(home.rglob(".tmp-*"))


class TestVocabFile:
    @pytest.mark.parametrize(
        ("lines", "newlines", "symbols"),
        [
            (b"the 9\nof 7\n<unk> 2\n", "keep", "<eos> the of <unk>"),
            (b"the 9\nof 7\n<unk> 2\n", "sentence", "<S> the of <unk>"),
            (b"the\nof\n<unk>", "drop", "the of <unk>"),
            (b"the\nof\n", "keep", "<eos> <unk> the of"),
            (b"\xef\xbb\xbfthe\nof\n", "keep", "<eos> <unk> the of"),
            (b"<UNK>\nof\n<eos>\n", "keep", "<UNK> of <eos>"),
            (b"1990 3\n12 2\n", "keep", "<eos> <unk> 1990 12"),
            (b"1990\n12\n", "keep", "<eos> <unk> 1990 12"),
        ],
    )
    def test_words_keep_the_order_of_the_file(self, lines: bytes, newlines: Any, symbols: str) -> None:
        assert Vocab.read(lines, "file", newlines=newlines).symbols == tuple(symbols.split())

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            (b"the 1\n\nof the 2\n", r"one per line, .* line 3 is 'of the 2'"),
            (b"the 1\nof\n", r"line 2 is 'of'"),
            (b"the\nof 1\n", r"line 2 is 'of 1'"),
            (b"the\nof\nthe\n", r"each word once, .* line 3 is 'the'"),
            (b"\n\n", "is empty"),
            (b"\xff", "UTF-8"),
        ],
    )
    def test_another_file_is_refused(self, content: bytes, sentence: str) -> None:
        with pytest.raises(ValueError, match=f"^file must .*{sentence}"):
            Vocab.read(content, "file")

    def test_a_vocabulary_file_is_for_words_and_byte_pairs(self) -> None:
        with pytest.raises(ValueError, match=r'for unit = "word" or "bpe", got "char"'):
            Vocab.read(b"a", "file", unit="char")

    def test_any_text_can_use_a_vocabulary_file(self, tmp_path: Path) -> None:
        (tmp_path / "text").write_text("the cat\n" * 40)
        (tmp_path / "vocab.txt").write_text("cat\nbird\n")
        corpus = open_corpus(CorpusConfig(name=str(tmp_path / "text"), unit="word", vocab=str(tmp_path / "vocab.txt")))
        assert corpus.vocab.symbols == (EOS, UNK, "cat", "bird")
        assert corpus.header.splits["train"].unknown == 37
        with pytest.raises(FileNotFoundError, match=r"corpus\.vocab must be a file, and .*none\.txt is none"):
            open_corpus(CorpusConfig(name=str(tmp_path / "text"), unit="word", vocab=str(tmp_path / "none.txt")))


class TestPairs:
    TEXT = "the cat sat\n  on the mat, été 中文\n\n" * 40

    def test_text_is_restored_and_frequent_pairs_come_first(self, tmp_path: Path) -> None:
        (tmp_path / "text").write_text(self.TEXT)
        config = CorpusConfig(name=str(tmp_path / "text"), unit="bpe", bpe_size=270)
        corpus = open_corpus(config)
        vocab, ids = corpus.vocab, corpus.split("train").ids
        assert vocab.decode_bytes(ids) == self.TEXT.encode()[: len(self.TEXT.encode()) * 9 // 10]
        assert vocab.token_sizes()[ids].sum() == corpus.header.splits["train"].bytes
        counts = np.bincount(ids, minlength=len(vocab))
        assert (np.diff(counts) <= 0).all(), "ids go by frequency"
        assert vocab.line_end == vocab.encode("\n").item() and len(vocab) == 270
        again = Vocab.from_json(json.loads(json.dumps(vocab.to_json())))
        assert again == vocab and again.fingerprint == vocab.fingerprint
        again = open_corpus(config)
        assert again == corpus and replace(again, notes=()) == corpus and again.path == corpus.path
        assert open_corpus(replace(config, bpe_size=265)).path != corpus.path
        dropping = open_corpus(replace(config, newlines="drop"))
        assert b"\n" not in dropping.vocab.decode_bytes(dropping.split("train").ids)

    def test_a_given_tokenizer_keeps_its_ids(self, tmp_path: Path) -> None:
        tokenizer = train_bpe([self.TEXT], 270)
        (tmp_path / "tokenizer.json").write_text(tokenizer)
        (tmp_path / "text").write_text(self.TEXT)
        config = CorpusConfig(name=str(tmp_path / "text"), unit="bpe", vocab=str(tmp_path / "tokenizer.json"))
        corpus = open_corpus(config)
        assert corpus.vocab.symbols == Subwords(tokenizer).symbols
        assert corpus.vocab.decode(corpus.vocab.encode("a\ud800b")) == "a\ufffd\ufffd\ufffdb"


@needs_data
@pytest.mark.outside
def test_enwik8_equals_the_published_corpus(tmp_path: Path) -> None:
    """One test for both treatments of line ends, because each preparation reads 100 MB."""
    (tmp_path / "enwik8").write_bytes(read_file(DATA / "enwik8" / "enwik8.xz"))
    drop = prepare("enwik8", tmp_path / "enwik8")
    keep = prepare("enwik8", tmp_path, newlines="keep")
    assert drop.vocab.symbols == tuple(b for b in keep.vocab.symbols if b != 10)
    text = keep.vocab.decode_bytes(keep.split("test").ids)
    assert hashlib.sha256(text).hexdigest() == "86f62c0adeb6c27763f308b8913bec743626421a4d2b4010f1e177a40eef7750"
    assert drop.vocab.decode_bytes(drop.split("test").ids) == text.replace(b"\n", b"")


@pytest.mark.parametrize("name", DATASETS)
def test_every_published_corpus_has_three_splits_of_files_that_can_be_downloaded(name: str) -> None:
    dataset = DATASETS[name]
    assert len(dataset.files) == (1 if dataset.cuts else 3) or set(dataset.splits) == set(SPLITS)
    assert {file for files in dataset.splits.values() for file in files} <= set(dataset.files)
    assert dataset.downloads and all(dataset.downloads)
    assert all(origin.name for origins in dataset.downloads for origin in origins), "the name of its file"
    if dataset.cuts and (whole := dataset.protocols.get("keep")):
        first, second = dataset.cuts
        assert [whole[f"tokens in {split}"] for split in ("train", "valid")] == [first, second - first]


@needs_data
@pytest.mark.parametrize("name", ["ptb", "ptb-char", "wikitext-2", "wikitext-2-raw"])
def test_every_available_corpus_has_the_published_counts(name: str) -> None:
    """`prepare` compares all counts."""
    corpus = prepare(name, DATA / name)
    assert corpus.name == name
    if name == "ptb-char":
        words = read_file(DATA / "ptb" / "ptb.test.txt.xz").decode()
        lines = [line.strip() for line in words.splitlines()]
        assert corpus.vocab.decode(corpus.split("test").ids) == "\n".join([*lines, ""])
