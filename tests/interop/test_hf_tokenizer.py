"""A vocabulary as a tokenizer of transformers: the same ids, and no byte of a text is lost."""

from __future__ import annotations

import copy

import pytest
import torch
from amount import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transformer_xl.data.subwords import train_bpe
from transformer_xl.data.vocab import Vocab

transformers = pytest.importorskip("transformers", minversion="5")

from transformers import AutoTokenizer  # noqa: E402

from transformer_xl.hf import fast_tokenizer  # noqa: E402

transformers.utils.logging.disable_progress_bar()

SAMPLE = "the cat's  hat\n\n<unk> <eos> a<eos>b \u00e9\u4e2d\u6587 <S>\n x<unk>"
TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab the\n\t\r <>unk\u00e9\u00ff\u00a0\x1c\x85\u3000\u010a\u010c\ufffd"),
        st.characters(codec="utf-8"),
    )
)


def vocabularies() -> dict[str, Vocab]:
    """Every unit with every treatment of line ends. Vocabularies without <unk> have all the tokens of the texts."""
    found = {}
    for newlines in ("keep", "drop", "sentence"):
        found[f"word {newlines}"] = Vocab.build("word", [SAMPLE], newlines=newlines)
    for newlines in ("keep", "drop"):
        found[f"char {newlines}"] = Vocab.build("char", [SAMPLE], newlines=newlines)
        found[f"byte {newlines}"] = Vocab.build("byte", [], newlines=newlines)
        found[f"bpe {newlines}"] = Vocab.of_tokenizer(train_bpe([SAMPLE * 3], 270), newlines)
    return found | {"bpe with an added token": Vocab.of_tokenizer(train_bpe([SAMPLE * 3], 271, ["<|end|>"]))}


VOCABULARIES = vocabularies()


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The tokenizers of `VOCABULARIES`, saved and loaded."""
    found = {}
    for name, vocab in VOCABULARIES.items():
        folder = tmp_path_factory.mktemp("tokenizer")
        fast_tokenizer(vocab).save_pretrained(folder)
        found[name] = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    return found


@pytest.mark.parametrize("name", VOCABULARIES)
@given(content=TEXTS, more=st.lists(st.integers(0, 1 << 20), max_size=9))
@example(content=SAMPLE, more=[0, 0, 1, 0, 2])
@example(content="<|end|>the\u2028cat", more=[])
@example(content="a\u00ff \u00ffb", more=[])
@settings(max_examples=examples(60))
def test_a_tokenizer_encodes_and_decodes_as_its_vocabulary(name, tokenizers, content, more):
    vocab, tokenizer = VOCABULARIES[name], tokenizers[name]
    ids = vocab.encode(content).tolist()
    assert tokenizer.encode(content, add_special_tokens=False) == ids
    assert tokenizer(content)["input_ids"] == [*vocab.opening_ids.tolist(), *ids]
    if vocab.unit in ("byte", "bpe"):
        assert tokenizer.decode(ids) == (content.replace("\n", "") if vocab.newlines == "drop" else content)
    kept = tokenizer.decode(ids, skip_special_tokens=True)
    assert kept == tokenizer.decode(ids).replace("<|end|>" if "added" in name else "\uffff", "")
    for some in (ids, [i % len(vocab) for i in more]):
        assert tokenizer.decode(some) == vocab.decode(some)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_tokenizer_adds_no_token_and_pads_on_the_left(name, tokenizers):
    vocab, tokenizer = VOCABULARIES[name], copy.deepcopy(tokenizers[name])
    assert len(tokenizer) == len(vocab) and tokenizer.is_fast
    padded = vocab.unit in ("byte", "bpe") and "added" not in name
    begin, end = (None, None) if "added" in name else (vocab.line_end or 0, vocab.line_end)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (begin, end)
    if padded:
        assert vocab.decode_bytes([tokenizer.pad_token_id]) == b"\xff"
    else:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(len(vocab) - 1)  # as users do
    batch = tokenizer(["the", "the cat the"], padding=True, add_special_tokens=False)
    for row, mask, content in zip(batch["input_ids"], batch["attention_mask"], ["the", "the cat the"], strict=True):
        ids = vocab.encode(content).tolist()
        assert row[-len(ids) :] == ids and mask == [0] * (len(row) - len(ids)) + [1] * len(ids)


def test_no_byte_of_a_text_is_lost_from_the_labels(tokenizers):
    tokenizer = tokenizers["byte keep"]
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batch = collate([tokenizer(content) for content in (SAMPLE, "\u00ff\n", "".join(map(chr, range(0x100))))])
    assert torch.equal(batch["labels"] >= 0, batch["attention_mask"] == 1)


def test_a_token_that_a_closed_vocabulary_lacks_is_refused():
    for vocab in (Vocab.build("byte", ["ab"], closed=True), Vocab("char", ("a", "b")), Vocab("word", ("<eos>", "a"))):
        tokenizer = fast_tokenizer(vocab)
        assert tokenizer.encode("a") == vocab.encode("a").tolist()
        with pytest.raises(Exception, match=r"(?i)unk"):
            tokenizer.encode("c")


def test_the_end_of_documents_and_padding_of_a_tokenizer_are_kept():
    vocab = Vocab.of_tokenizer(train_bpe([SAMPLE * 3], 270, ["<|endoftext|>", "<pad>"]))
    end = vocab.id_of("<|endoftext|>")
    tokenizer = fast_tokenizer(vocab, end)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (end, vocab.id_of("<pad>"))
    assert (
        tokenizer("the<|endoftext|>cat", add_special_tokens=False).input_ids
        == vocab.encode("the<|endoftext|>cat").tolist()
    )
    assert fast_tokenizer(Vocab.build("word", ["a <eod> b"]), 2).eos_token_id == 2


@pytest.mark.parametrize("newlines", ["keep", "drop"])
def test_an_exported_tokenizer_adds_no_tokens_of_its_own(newlines):
    import tokenizers as library

    own = library.Tokenizer(library.models.WordLevel({"[UNK]": 0, "[CLS]": 1, "the": 2, "cat": 3}, unk_token="[UNK]"))
    own.normalizer = library.normalizers.Lowercase()
    own.pre_tokenizer = library.pre_tokenizers.Whitespace()
    own.post_processor = library.processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 1)])
    vocab = Vocab.of_tokenizer(own.to_str(), newlines)
    assert fast_tokenizer(vocab)("The cat\nthe").input_ids == vocab.encode("The cat\nthe").tolist()
