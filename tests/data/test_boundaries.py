"""`corpus.document_end`: a token that ends documents in one stream, as the text has it or added after each."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import split as words
from typing import Any

import numpy as np
import pytest
from tiny_runs import TINY, TRAIN, printed, refused

from transformer_xl.commands.main import main
from transformer_xl.config.settings import CorpusConfig, Unit
from transformer_xl.data.corpus import Corpus
from transformer_xl.data.datasets import open_corpus
from transformer_xl.mistake import Mistake
from transformer_xl.run.folder import Run

DOCUMENTS = ["the cat sat\non a mat", "the dog", "a <eod> <eod>", "it ran\n"]
END = "<eod>"


def written(folder: Path, joined: str | None = None) -> Path:
    """A folder with the documents as lines of JSON, or as a text with this between them."""
    folder.mkdir()
    for split in ("train", "valid", "test"):
        if joined is None:
            lines = (json.dumps({"text": each}) + "\n" for each in DOCUMENTS)
            (folder / f"{split}.jsonl").write_text("".join(lines))
        else:
            (folder / f"{split}.txt").write_text(joined.join(DOCUMENTS) + joined)
    return folder


def opened(path: Path, unit: Unit, end: str, **settings: object) -> Corpus:
    return open_corpus(CorpusConfig(name=str(path), unit=unit, document_end=end, **settings))


@pytest.mark.parametrize("unit", ["word", "bpe"])
def test_a_token_is_added_after_each_document_that_does_not_end_with_it(tmp_path: Path, unit: Unit) -> None:
    corpus = opened(written(tmp_path / "lines"), unit, END, bpe_size=300)
    train = corpus.split("train")
    end = corpus.vocab.id_of(END)
    assert train.documents is None, "they are joined"
    parts = np.split(train.ids, np.flatnonzero(train.ids == end) + 1)
    assert len(parts.pop()) == 0, "the last document ends too"
    texts = [corpus.vocab.decode(part[:-1]) for part in parts]
    ends = "\n" if unit == "word" else ""
    expected = [DOCUMENTS[0] + ends, DOCUMENTS[1] + ends, "a " if unit == "bpe" else "a", " ", DOCUMENTS[3]]
    if unit == "word":  # the end of the document's last line follows its token
        expected[3:] = ["", "\n" + DOCUMENTS[3]]
    assert texts == expected


@pytest.mark.parametrize(
    ("unit", "joined"), [("word", " <eod> "), ("bpe", END), ("bpe", "|"), ("char", "#"), ("byte", "#")]
)
def test_a_text_has_the_token_itself(tmp_path: Path, unit: Unit, joined: str) -> None:
    corpus = opened(written(tmp_path / "text", joined), unit, joined.strip(" "), bpe_size=300)
    ids = corpus.split("train").ids
    assert (ids == corpus.vocab.id_of(joined.strip(" "))).sum() == len(DOCUMENTS) + 2 * (END in joined)
    assert unit != "bpe" or corpus.vocab.id_of("\u00a7") is None, "a byte's token is written in another character"


@pytest.mark.parametrize(("dtype", "last"), [(np.uint16, 9), (np.uint8, 300)])
def test_ids_get_it_between_their_documents(tmp_path: Path, dtype: Any, last: int) -> None:
    """Also one that the type of the ids cannot hold."""
    np.save(tmp_path / "songs.npy", np.random.default_rng(0).integers(1, 10, (40, 3), dtype))
    marked, plain = (opened(tmp_path / "songs.npy", "id", end) for end in (str(last), ""))
    assert marked.header.splits["train"].bytes == plain.header.splits["train"].bytes, "the file's"
    found, whole = marked.split("train"), plain.split("train")
    assert found.documents is None and whole.documents is not None
    expected = [part if part[-1] == last else [*part, last] for part in np.split(whole.ids, whole.documents[1:])]
    assert found.ids.tolist() == [number for part in expected for number in part]
    assert len(marked.vocab) == last + 1


def test_what_is_no_token_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = written(tmp_path / "lines")
    for unit, end in (("byte", END), ("char", END), ("word", "two words")):
        with pytest.raises(Mistake, match=r"corpus\.document_end must be one token of the vocabulary \(.*, got"):
            opened(lines, unit, end)
    text = written(tmp_path / "text", " ")
    line = f"train text-small --data {text} --corpus.document-end + --out {tmp_path / 'out'}"
    assert refused(line, capsys).startswith(
        "corpus.document_end must occur in the training split of text, and '+' does"
    )
    line = f"train text-small --data {lines} --corpus.unit word --corpus.document-end {END} --model.document-end 7"
    assert refused(f"{line} --out {tmp_path / 'out'}", capsys).startswith("model.document_end must be ")
    assert not (tmp_path / "out").exists()


def test_a_run_keeps_it_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training, resuming, evaluation of another text, and a run from its weights follow the boundary."""
    lines, out = written(tmp_path / "lines"), tmp_path / "run"
    assert opened(lines, "word", END, min_count=9).vocab.id_of(END) is not None, "it stays, however rare"
    settings = f"--data {lines} --corpus.unit word --corpus.document-end {END} --no-report"
    assert main([*words(f"train text-small {settings} --out {out}"), *TINY]) == 0
    config = Run(out).settings()
    assert config.corpus.document_end == END and config.model.document_end is not None
    assert main(words(f"train --resume --out {out} --train.max-steps 6 --no-report")) == 0
    [found] = json.loads(printed(f"eval {out} --data {lines} --split train --json", capsys))["results"]
    texts = [f"{text} " for text in " ".join(DOCUMENTS).split()[1:]]
    assert found["bytes"] <= len("".join(texts)) + len(DOCUMENTS) + 1, "ends that were added count no bytes"
    again = tmp_path / "again"
    assert main([*words(f"train --init {out} --data {lines} --out {again} --no-report"), *TRAIN]) == 0
    assert Run(again).settings().model.document_end == config.model.document_end


def test_impossible_tokens_are_refused_before_any_work(tmp_path: Path) -> None:
    for unit in ("bpe", "byte"):
        with pytest.raises(ValueError, match="document_end must be UTF-8, because"):
            CorpusConfig(unit=unit, document_end="\udcff")
    np.save(tmp_path / "a.npy", np.arange(200))
    with pytest.raises(ValueError, match="document_end must be below 1,048,576, got 99,999,999,999"):
        opened(tmp_path / "a.npy", "id", "99999999999")
