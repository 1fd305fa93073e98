"""Vocabularies, token stores, published corpora and other people's files."""

from __future__ import annotations

import errno
import hashlib
import json
import lzma
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.data.corpus import OPENERS, Corpus, pieces
from transformer_xl.data.datasets import open_corpus, prepare, tokenised
from transformer_xl.data.published import DATASETS, Counts, Dataset, File, Protocol, Substitute
from transformer_xl.data.texts import read_file, read_splits
from transformer_xl.data.vocab import EOS, UNK, Vocab
from transformer_xl.settings import CorpusConfig

DATA = Path(__file__).parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the corpora are not here")
UNITS = ("byte", "char", "word")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text("ab \n\u00e9\u2028", max_size=60)
splits = {"train": b"a b\n\nb c\n", "valid": b"a b\n", "test": b"b c\n"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TXL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class TestVocab:
    @settings(deadline=None)
    @given(data=st.binary(max_size=80), closed=st.booleans())
    def test_bytes_come_back(self, data: bytes, closed: bool) -> None:
        vocab = Vocab.build("byte", [data], closed=closed)
        assert vocab.decode_bytes(vocab.encode(data)) == data
        dropping = Vocab.build("byte", [data], newlines="drop", closed=closed)
        assert dropping.decode_bytes(dropping.encode(data)) == data.replace(b"\n", b"")
        assert set(dropping.symbols) == set(vocab.symbols) - {10}

    @settings(deadline=None)
    @given(text=texts, closed=st.booleans())
    def test_characters_come_back(self, text: str, closed: bool) -> None:
        vocab = Vocab.build("char", [text], closed=closed)
        assert vocab.decode(vocab.encode(text)) == text
        assert len(vocab.encode(text)) == len(text)
        assert vocab.symbol_bytes()[vocab.encode(text)].sum() == len(text.encode())

    @settings(deadline=None)
    @given(lines=st.lists(st.lists(st.sampled_from(["the", "cat", "\u00e9t\u00e9", "<unk>"]), max_size=4), max_size=6))
    def test_words_come_back(self, lines: list[list[str]]) -> None:
        text = "\n".join(" ".join(line) for line in lines)
        vocab = Vocab.build("word", [text])
        ids = vocab.encode(text)
        assert vocab.decode(ids) == text
        assert len(ids) == sum(map(len, lines)) + max(len(lines) - 1, 0)
        assert vocab.decode(vocab.encode(" " + text.replace(" ", "  ") + "\t")) == text
        for cut in range(len(ids)):
            assert text.startswith(vocab.decode(ids[:cut]))

    @settings(deadline=None)
    @given(text=texts, size=st.integers(1, 9), unit=st.sampled_from(UNITS))
    def test_pieces_have_the_symbols_of_the_whole(self, text: str, size: int, unit) -> None:
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

    def test_rare_words_lend_their_frequency_to_unk(self) -> None:
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
    def test_a_symbol_without_id_is_named_with_its_place(self, unit, text: str | bytes) -> None:
        vocab = Vocab.build(unit, ["a b" if unit == "word" else b"ab" if unit == "byte" else "ab"], closed=True)
        with pytest.raises(ValueError, match=r"'\?', \w+ 3 of the text"):
            vocab.encode(text)
        with pytest.raises(ValueError, match=r"'\?', \w+ 13 of the text"):
            vocab.encode(text, start=10)

    def test_bytes_of_a_word_count_the_space_behind(self) -> None:
        vocab = Vocab.build("word", ["\u00e9t\u00e9 a\n"])
        assert vocab.symbol_bytes().tolist() == [1, 6, 2, 6]
        assert Vocab.build("byte", []).symbol_bytes().sum() == 256

    @pytest.mark.parametrize("unit", UNITS)
    def test_json_holds_all_of_it(self, unit) -> None:
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
        ],
    )
    def test_damaged_json_is_refused(self, wrong: dict) -> None:
        with pytest.raises(ValueError, match=r"vocab\.json"):
            Vocab.from_json({"unit": "byte", "newlines": "keep", "symbols": [1, 2]} | wrong)

    def test_bytes_of_a_command_line_survive(self) -> None:
        vocab = Vocab.build("byte", [])
        assert vocab.decode_bytes(vocab.encode(os.fsdecode(b"a\xff"))) == b"a\xff"
        assert vocab.decode(vocab.encode(b"a\xff")) == "a\ufffd"


class TestCorpus:
    def test_what_was_built_is_what_opens(self, tmp_path: Path) -> None:
        built = Corpus.build(tmp_path / "store", splits, name="letters", unit="word", source="a test")
        corpus = Corpus.open(tmp_path / "store", verify=True)
        assert corpus == built and corpus.vocab.symbols == (EOS, "b", "a", "c", UNK)
        train = corpus.split("train")
        assert train.ids.tolist() == [2, 1, 0, 0, 1, 3, 0] and isinstance(train.ids, np.memmap)
        assert train.ids.dtype == np.uint8 and train.documents is None and train.name == "train"
        header = corpus.header.splits["train"]
        assert (header.tokens, header.types, header.bytes, header.unknown) == (7, 4, 9, 0)
        assert header.sha256 == hashlib.sha256((tmp_path / "store" / "train.bin").read_bytes()).hexdigest()
        assert {p.name for p in (tmp_path / "store").iterdir()} == {
            "corpus.json", "vocab.json", "train.bin", "valid.bin", "test.bin"
        }  # fmt: skip

    def test_unknown_words_are_counted(self, tmp_path: Path) -> None:
        corpus = Corpus.build(tmp_path / "store", splits | {"test": b"x b <unk>\n"}, unit="word")
        assert corpus.header.splits["test"].unknown == 2

    @pytest.mark.parametrize("unit", UNITS)
    def test_documents_start_where_their_text_does(self, tmp_path: Path, unit) -> None:
        texts = [b"a b", b"", b"c\nd", b"a"]
        corpus = Corpus.build(tmp_path / "store", {"train": texts}, unit=unit, documents=True)
        split = corpus.split("train")
        assert split.documents is not None
        parts = np.split(split.ids, split.documents[1:])
        end = b"\n" if unit == "word" else b""
        assert [corpus.vocab.decode_bytes(part) for part in parts] == [text + end for text in texts if text]

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
            ("corpus.json", b"{}", "is not a transformer-xl token store of version 1"),
            ("corpus.json", b'{"format": "transformer-xl token store", "version": 1}', "is damaged"),
            ("vocab.json", b'{"unit": "byte", "newlines": "keep", "symbols": [1]}', "is not the vocabulary"),
        ],
    )
    def test_damage_is_refused(self, tmp_path: Path, file: str, content: bytes, sentence: str) -> None:
        store = Corpus.build(tmp_path / "store", splits).path
        (store / file).write_bytes(content)
        with pytest.raises(ValueError, match=sentence):
            Corpus.open(store)
        assert Corpus.build(store, splits, reuse=True).split("train").ids.size == 9

    def test_the_hash_finds_what_sizes_do_not(self, tmp_path: Path) -> None:
        store = Corpus.build(tmp_path / "store", splits).path
        (store / "train.bin").write_bytes(bytes(9))
        Corpus.open(store)
        with pytest.raises(ValueError, match="SHA-256"):
            Corpus.open(store, verify=True)

    def test_a_missing_store_is_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="There is no token store"):
            Corpus.open(tmp_path / "store")

    def test_a_full_disk_leaves_the_old_store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = Corpus.build(tmp_path / "store", splits).path

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"Cannot write the token store .*: No space left on device\. Make room"):
            Corpus.build(store, splits | {"train": b"other text"})
        assert Corpus.open(store, verify=True).header.splits["train"].tokens == 9
        assert {p.name for p in tmp_path.iterdir()} == {"store", ".store.lock"}

    def test_a_store_replaces_a_store_and_nothing_else(self, tmp_path: Path) -> None:
        Corpus.build(tmp_path / "store", splits)
        assert Corpus.build(tmp_path / "store", splits | {"train": b"xyz"}).header.splits["train"].tokens == 3
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").touch()
        with pytest.raises(ValueError, match="is not a token store"):
            Corpus.build(tmp_path / "mine", splits)
        assert (tmp_path / "mine" / "thesis.txt").exists()

    def test_a_split_has_a_target(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="valid split of store must have at least 2 tokens"):
            Corpus.build(tmp_path / "store", splits | {"valid": b"a"})
        assert not (tmp_path / "store").exists()


class TestAnyText:
    @settings(deadline=None)
    @given(text=texts, unit=st.sampled_from(UNITS))
    def test_cutting_a_file_loses_nothing(self, tmp_path_factory: pytest.TempPathFactory, text: str, unit) -> None:
        file = tmp_path_factory.getbasetemp() / "cut.txt"
        text = (text.replace("\0", "").replace("\ufeff", "") + " ") * 100 + "\n"
        file.write_bytes(text.encode())
        parts = {split: b"".join(texts) for split, texts in read_splits(file, unit).items()}
        assert parts["train"] + parts["valid"] + parts["test"] == text.encode()
        if unit == "char":
            assert "".join(part.decode() for part in parts.values()) == text
        if unit == "word":
            assert [word for part in parts.values() for word in part.decode().split()] == text.split()

    def test_shares_are_90_5_5(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(bytes(2000))
        corpus = open_corpus(CorpusConfig(name=str(tmp_path / "a.txt")))
        assert [corpus.header.splits[split].tokens for split in ("train", "valid", "test")] == [1800, 100, 100]
        assert corpus.name == "a.txt"

    def test_words_are_cut_behind_lines_unless_these_are_long(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"word word\n" * 95)
        assert all(b"".join(texts).endswith(b"\n") for texts in read_splits(tmp_path / "a.txt", "word").values())
        (tmp_path / "a.txt").write_bytes(b"word " * 195 + b"\nword\n")
        assert len(read_splits(tmp_path / "a.txt", "word")["valid"][0].split()) == 10

    def test_words_on_one_line_are_cut_between_words(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"word " * 199 + b"word")
        parts = read_splits(tmp_path / "a.txt", "word")
        assert {split: len(b"".join(texts).split()) for split, texts in parts.items()} == {
            "train": 181, "valid": 10, "test": 9
        }  # fmt: skip

    def test_files_named_after_splits_are_those(self, tmp_path: Path) -> None:
        for name, text in {"x.train.txt": b"tr", "validation.txt": b"va", "test.md": b"te", "README": b"no"}.items():
            (tmp_path / name).write_bytes(text)
        assert read_splits(tmp_path, "byte") == {"train": [b"tr"], "valid": [b"va"], "test": [b"te"]}

    def test_a_folder_may_hold_a_test_split_only(self, tmp_path: Path) -> None:
        (tmp_path / "test.txt").write_bytes(b"b a")
        corpus = open_corpus(CorpusConfig(name=str(tmp_path)), Vocab.build("word", ["a b"]))
        assert corpus.split("test").ids.tolist() == [2, 1, 0]

    def test_source_code_with_a_train_file_is_not_taken_apart(self, tmp_path: Path) -> None:
        for name in ("train.py", "test.py", "model.py"):
            (tmp_path / name).write_bytes(name.encode() * 10)
        parts = read_splits(tmp_path, "byte")
        glued = b"".join(b"".join(texts) for texts in parts.values())
        assert glued == b"model.py" * 10 + b"test.py" * 10 + b"train.py" * 10

    def test_files_are_glued_in_order_and_hidden_ones_left_out(self, tmp_path: Path) -> None:
        (tmp_path / "b" / ".git").mkdir(parents=True)
        for name in ("b/c", "a", "b/.git/x", ".hidden", "z"):
            (tmp_path / name).write_bytes(f"{name} ".encode() * 40)
        (tmp_path / "empty").touch()
        os.mkfifo(tmp_path / "pipe")
        parts = read_splits(tmp_path, "word")
        glued = b"".join(b"".join(texts) for texts in parts.values())
        assert glued == b"a " * 40 + b"\n" + b"b/c " * 40 + b"\n" + b"z " * 40 + b"\n"

    @settings(deadline=None)
    @given(sizes=st.lists(st.integers(1, 50), min_size=3, max_size=12))
    def test_whole_files_are_held_out(self, tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
        folder = tmp_path_factory.mktemp("files")
        for i, size in enumerate(sizes):
            (folder / f"{i:02}").write_bytes(bytes([i]) * size)
        parts = read_splits(folder, "byte", whole_files=True)
        assert parts["train"] + parts["valid"] + parts["test"] == [bytes([i]) * size for i, size in enumerate(sizes)]
        assert all(parts.values())
        held_out = sum(map(len, parts["test"]))
        assert held_out >= sum(sizes) / 20 or len(parts["train"] + parts["valid"]) == 2
        assert held_out - len(parts["test"][0]) < sum(sizes) / 20

    def test_documents_reach_the_corpus(self, tmp_path: Path) -> None:
        for name in "abcd":
            (tmp_path / name).write_text(name * 5)
        config = CorpusConfig(name=str(tmp_path), reset_documents=True)
        starts = open_corpus(config).split("train").documents
        assert starts is not None and starts.tolist() == [0, 5]
        assert open_corpus(CorpusConfig(name=str(tmp_path))).split("train").documents is None

    def test_a_changed_file_is_tokenised_again(self, tmp_path: Path) -> None:
        file, config = tmp_path / "a.txt", CorpusConfig(name=str(tmp_path / "a.txt"))
        file.write_bytes(b"a" * 100)
        first = open_corpus(config)
        written = (first.path / "train.bin").stat().st_mtime_ns
        assert open_corpus(config).path == first.path
        assert (first.path / "train.bin").stat().st_mtime_ns == written
        file.write_bytes(b"b" * 100)
        assert open_corpus(config).split("train").ids[0] == ord("b")
        assert open_corpus(CorpusConfig(name=str(file), unit="char")).unit == "char"

    @pytest.mark.parametrize("suffix", ["xz", "gz", "bz2"])
    def test_compressed_text_is_text(self, tmp_path: Path, suffix: str) -> None:
        file = tmp_path / f"a.txt.{suffix}"
        with OPENERS[f".{suffix}"](file, "wb") as out:
            out.write(b"abc" * 100)
        assert read_splits(file, "char")["train"] == [b"abc" * 90]
        file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises((ValueError, OSError), match=r"a\.txt"):
            read_splits(file, "char")

    def test_a_byte_order_mark_is_a_byte_and_no_character(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"ab " * 40)
        assert read_splits(tmp_path / "a.txt", "byte")["train"][0].startswith(b"\xef\xbb\xbfab")
        for unit in ("char", "word"):
            assert read_splits(tmp_path / "a.txt", unit)["train"][0].startswith(b"ab")

    @pytest.mark.parametrize("unit", ["char", "word"])
    @pytest.mark.parametrize(("content", "place"), [(b"abc\0def", "byte 3 is 0x00"), (b"ab\xff", "byte 2 is 0xff")])
    def test_binary_is_no_text(self, tmp_path: Path, unit, content: bytes, place: str) -> None:
        (tmp_path / "image.png").write_bytes(content)
        with pytest.raises(ValueError, match=rf"image\.png must be UTF-8 text .* {place}"):
            open_corpus(CorpusConfig(name=str(tmp_path / "image.png"), unit=unit))

    @pytest.mark.parametrize(
        ("name", "error", "sentence"),
        [
            ("empty.txt", ValueError, "no text for the train split: it is empty"),
            ("short.txt", ValueError, "no text for the valid split: it is empty or too short"),
            ("folder", ValueError, "no text for the train split"),
            ("pipe", ValueError, "is a pipe or a device"),
            ("missing.txt", FileNotFoundError, "there is no .*missing.txt"),
        ],
    )
    def test_a_users_mistake_gets_a_sentence(self, tmp_path: Path, name: str, error: type, sentence: str) -> None:
        (tmp_path / "empty.txt").touch()
        (tmp_path / "short.txt").write_text("abc")
        (tmp_path / "folder").mkdir()
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(error, match=sentence):
            open_corpus(CorpusConfig(name=str(tmp_path / name)))

    def test_names_are_explained(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="it is empty"):
            open_corpus(CorpusConfig())
        with pytest.raises(FileNotFoundError, match="Did you mean enwik8"):
            open_corpus(CorpusConfig(name="enwiki8"))
        (tmp_path / "one").write_text("one")
        with pytest.raises(ValueError, match="at least 3"):
            open_corpus(CorpusConfig(name=str(tmp_path / "one"), reset_documents=True))


class TestPublished:
    @pytest.fixture
    def tiny(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        text = b"ab\nb" * 5
        spec = Dataset(
            unit="byte",
            files={"tiny": hashlib.sha256(text).hexdigest()},
            protocols={"drop": Published((8, 3, 4), 2), "keep": Published((10, 5, 5), 4)},
            cuts=(10, 15),
        )
        monkeypatch.setitem(DATASETS, "tiny", spec)
        (tmp_path / "source").mkdir()
        (tmp_path / "source" / "tiny.xz").write_bytes(lzma.compress(text))
        return tmp_path / "source"

    def test_protocols_are_two_stores(self, tiny: Path, home: Path) -> None:
        config = CorpusConfig(name="tiny", newlines="drop")
        with pytest.raises(FileNotFoundError, match="run `txl data tiny --source PATH`"):
            open_corpus(config)
        assert prepare("tiny", tiny / "tiny.xz", newlines="drop").path == home / "corpora" / "tiny"
        with pytest.raises(FileNotFoundError, match="--source PATH --newlines keep`"):
            open_corpus(CorpusConfig(name="tiny"))
        corpus = open_corpus(config)
        assert corpus.vocab.symbols == tuple(b"ba")
        assert corpus.vocab.decode(corpus.split("valid").ids) == "bab"

    def test_other_content_and_other_counts_are_refused(self, tiny: Path, home: Path) -> None:
        with pytest.raises(ValueError, match=r"must come to .* and came to .*\(10, 5, 5\), vocab_size=3\)"):
            prepare("tiny", tiny, newlines="keep")
        assert not (home / "corpora" / "tiny-keep").exists()
        (tiny / "tiny").write_bytes(b"something else")
        with pytest.raises(ValueError, match="is not the published tiny: its content has SHA-256"):
            prepare("tiny", tiny, newlines="drop")
        with pytest.raises(FileNotFoundError, match=r"must be a folder with tiny .* has no tiny"):
            prepare("tiny", tiny.parent, newlines="drop")
        with pytest.raises(ValueError, match="one of enwik8, ptb"):
            prepare("text9", tiny, newlines="drop")
        with pytest.raises(ValueError, match=r"corpus\.newlines must be 'keep' for ptb"):
            prepare("ptb", tiny, newlines="drop")

    def test_the_wrong_unit_or_vocabulary_is_refused(self, tiny: Path) -> None:
        path = str(prepare("tiny", tiny, newlines="drop").path)
        for name in ("tiny", path):
            with pytest.raises(ValueError, match=r'corpus\.unit must be "byte"'):
                open_corpus(CorpusConfig(name=name, unit="char", newlines="drop"))
            with pytest.raises(ValueError, match=r"\(256 bytes, newlines kept\) is not that of .*\(2 bytes"):
                open_corpus(CorpusConfig(name=name, newlines="drop"), Vocab.build("byte", []))
            assert open_corpus(CorpusConfig(name=name, newlines="drop")).name == "tiny"

    def test_a_models_line_ends_say_nothing_of_another_corpus(self, tiny: Path, monkeypatch) -> None:
        prepare("tiny", tiny, newlines="drop")
        spec = DATASETS["tiny"]
        monkeypatch.setitem(DATASETS, "tiny", replace(spec, protocols={"drop": spec.protocols["drop"]}))
        with pytest.raises(ValueError, match="is not that of the corpus tiny"):
            open_corpus(CorpusConfig(name="tiny", newlines="keep"), Vocab.build("byte", []))


@needs_data
def test_enwik8_is_the_published_one(tmp_path: Path) -> None:
    """One test for both protocols, for each preparation reads 100 MB."""
    (tmp_path / "enwik8").write_bytes(read_file(DATA / "enwik8" / "enwik8.xz"))
    drop = prepare("enwik8", tmp_path / "enwik8", newlines="drop")
    keep = prepare("enwik8", tmp_path, newlines="keep")
    assert (len(drop.vocab), len(keep.vocab)) == (204, 205)
    assert [s.tokens for s in drop.header.splits.values()] == [88_982_818, 4_945_742, 4_943_417]
    assert [s.tokens for s in keep.header.splits.values()] == [90_000_000, 5_000_000, 5_000_000]
    assert [s.types for s in keep.header.splits.values()] == [205, 203, 198]
    assert drop.vocab.symbols == tuple(b for b in keep.vocab.symbols if b != 10)
    text = keep.vocab.decode_bytes(keep.split("test").ids)
    assert hashlib.sha256(text).hexdigest() == "86f62c0adeb6c27763f308b8913bec743626421a4d2b4010f1e177a40eef7750"
    assert drop.vocab.decode_bytes(drop.split("test").ids) == text.replace(b"\n", b"")


@needs_data
def test_ptb_is_the_published_one() -> None:
    corpus = prepare("ptb", DATA / "ptb", newlines="keep")
    assert [s.tokens for s in corpus.header.splits.values()] == [929_589, 73_760, 82_430]
    assert [s.unknown for s in corpus.header.splits.values()] == [45_020, 3_485, 4_794]
    assert len(corpus.vocab) == 10_000 and corpus.vocab.symbols[:4] == (EOS, "the", UNK, "N")
    source = read_file(DATA / "ptb" / "ptb.test.txt.xz").decode()
    decoded = corpus.vocab.decode(corpus.split("test").ids)
    assert [line.split() for line in decoded.split("\n")] == [line.split() for line in source.split("\n")]
    assert corpus.vocab.encode("zyzzyva").tolist() == [2]


@needs_data
def test_wikitext_2_on_the_fly() -> None:
    corpus = open_corpus(CorpusConfig(name=str(DATA / "wikitext-2"), unit="word"))
    assert [s.tokens for s in corpus.header.splits.values()] == [2_088_628, 217_646, 245_569]
    assert len(corpus.vocab) == 33_278
