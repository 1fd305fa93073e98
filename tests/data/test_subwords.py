"""Tokenizers that are not byte-level: they decode what they encode, lose what is said, and do not depend on cuts."""

from __future__ import annotations

import json
from collections.abc import Callable
from shlex import split as words
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
from tiny_runs import TINY, printed, refused  # noqa: E402
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers  # noqa: E402

from transformer_xl.commands.main import main  # noqa: E402
from transformer_xl.data.subwords import Subwords  # noqa: E402
from transformer_xl.data.vocab import Vocab  # noqa: E402
from transformer_xl.run.folder import Run  # noqa: E402

TEXT = (
    "The cab and the cats sat on a mat, and didn't move.\nCaf\u00e9s  open at nine ( in Paris ) .\n"
    "  A dog barked: \u4e2d\u6587!\n"
)
LINES = (TEXT * 20).split("\n")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def trained(model: Any, trainer: Any, *, pre: Any, decoder: Any = None, normalizer: Any = None) -> dict[str, Any]:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre
    if decoder is not None:
        tokenizer.decoder = decoder
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(LINES, trainer)
    return json.loads(tokenizer.to_str())


def unigram() -> dict[str, Any]:
    """As T5's: SentencePiece with a normaliser."""
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False)
    metaspace = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return trained(models.Unigram(), trainer, pre=metaspace[0], decoder=metaspace[1], normalizer=normalizers.NFKC())


def llama() -> dict[str, Any]:
    """As Llama's: SentencePiece's pairs, a space before the text, and bytes for what is unknown."""
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", *BYTES], show_progress=False)
    found = trained(models.BPE(unk_token="<unk>"), trainer, pre=pre_tokenizers.Metaspace())
    found["model"] |= {"byte_fallback": True, "fuse_unk": True}
    found["added_tokens"] = found["added_tokens"][:2]
    found["pre_tokenizer"] = None
    steps = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    found["normalizer"] = {"type": "Sequence", "normalizers": steps}
    undo = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    found["decoder"] = {"type": "Sequence", "decoders": [undo, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    return found


def bert() -> dict[str, Any]:
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[PAD]"], show_progress=False)
    return trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        pre=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
        normalizer=normalizers.BertNormalizer(lowercase=True),
    )


def word_level() -> dict[str, Any]:
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False)
    return trained(models.WordLevel(unk_token="[UNK]"), trainer, pre=pre_tokenizers.Whitespace())


def normalising() -> dict[str, Any]:
    """As Qwen's: byte-level pairs after NFC."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(models.BPE(), trainer, pre=pre, decoder=decoders.ByteLevel(), normalizer=normalizers.NFC())


KINDS: dict[str, tuple[Callable[[], dict[str, Any]], set[str]]] = {
    "unigram": (unigram, {"line ends", "combining characters"}),
    "llama": (llama, set()),
    "bert": (bert, {"capitals", "accents", "line ends", "several spaces", "spaces before punctuation"}),
    "word level": (word_level, {"line ends", "several spaces", "combining characters", "other scripts"}),
    "normalising": (normalising, {"combining characters"}),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, KINDS[request.param][0]()


def test_ids_are_the_librarys_and_decode_to_its_text(kind: tuple[str, dict[str, Any]]) -> None:
    name, content = kind
    ours, theirs = Subwords(json.dumps(content)), Tokenizer.from_str(json.dumps(content))
    assert ours.symbols == tuple(theirs.id_to_token(i) for i in range(theirs.get_vocab_size()))
    for text in (TEXT, "The mat", "Caf\u00e9s move.\n", "unknown zebras \U0001f600 too"):
        ids = ours.encode(text)
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids, text
        written = b"".join(ours.token_bytes[i] for i in ids).decode()
        expected = theirs.decode(ids.tolist(), skip_special_tokens=False)
        if name == "bert":  # its decoder joins "didn 't", which no single token tells
            written, expected = written.replace(" ", ""), expected.replace(" ", "")
        assert written.removeprefix(" ") == expected.removeprefix(" ")
    cut = TEXT.index(" cats")
    assert [*ours.encode(TEXT[:cut]), *ours.encode(TEXT[cut:])] == ours.encode(TEXT).tolist(), "cut between words"


def test_what_it_loses_is_said(kind: tuple[str, dict[str, Any]]) -> None:
    name, content = kind
    ours, lost = Subwords(json.dumps(content)), KINDS[name][1]
    assert lost <= set(ours.lost), ours.lost
    if not lost:
        assert not ours.lost and Vocab.of_tokenizer(json.dumps(content)).lost == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda found: found["model"].update(dropout=0.1), "it is random (dropout)"),
        (
            lambda found: found.update(normalizer={"type": "Replace", "pattern": {"Regex": "[^\x01]"}, "content": ""}),
            "decode",
        ),
        (lambda found: found["model"]["vocab"].update(gap=9999), "its ids are not 0, 1, 2 and so on"),
    ],
)
def test_what_cannot_be_read_back_is_refused(change, why, tmp_path, capsys) -> None:
    content = llama()
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "text.txt").write_text(TEXT * 50)
    line = f"train text-small --data {tmp_path}/text.txt --corpus.unit bpe --corpus.vocab {tmp_path}/tokenizer.json"
    assert why in refused(f"{line} --out {tmp_path}/out", capsys)


def test_a_model_of_such_tokens_is_trained_scored_and_writes(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram()))
    (tmp_path / "text.txt").write_text(TEXT * 100)
    out = tmp_path / "run"
    line = f"train text-small --data {tmp_path}/text.txt --corpus.unit bpe --corpus.vocab {tmp_path}/tokenizer.json"
    shown = printed([*words(f"{line} --no-report --out {out}"), *TINY], capsys)
    assert "The tokenizer loses line ends" in shown and "ppl" in shown
    assert Run(out).settings().model.vocab_size == len(unigram()["model"]["vocab"])
    assert printed(f"generate {out} --prompt 'The cats' --max-tokens 8 --seed 1", capsys).strip().startswith("The cats")
    assert main(words(f"train --resume --out {out} --train.max-steps 6 --no-report")) == 0


def test_no_character_is_lost_where_a_text_has_no_border() -> None:
    ours, text = Subwords(json.dumps(llama())), "bcat" * 9000
    written = b"".join(ours.token_bytes[i] for i in ours.encode(text)).decode()
    assert written.replace(" ", "") == text and written.count(" ") <= 4


def test_unknown_pieces_are_called_subwords() -> None:
    vocab = Vocab.of_tokenizer(json.dumps(word_level()))
    assert vocab.unknown_in(["zebra"], "the text") == "1 of 1 subwords of the text are unknown to the model"
