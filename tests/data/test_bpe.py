"""Byte pairs: every text is restored, pieces have the ids of the whole, and any other tokenizer is refused."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.config.settings import CorpusConfig
from transformer_xl.data import reading, subwords
from transformer_xl.data.subwords import Subwords, renumber, train_bpe
from transformer_xl.mistake import Mistake

TEXT = "The cat's hat sat, and the hat isn't that cat's.\n\nA rat sat there \n  that the cat ate.\n\u00e9t\u00e9 \u4e2d"
END = "<|endoftext|>"
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SIZE = 283
OURS = train_bpe([TEXT], SIZE)


def changed(change: Callable[[dict[str, Any]], object], content: str = OURS) -> str:
    tokenizer = json.loads(content)
    change(tokenizer)
    return json.dumps(tokenizer)


def like_gpt2(tokenizer: dict[str, Any]) -> None:
    """GPT-2's tokenizer.json: merges as strings; its end token is in the vocabulary and also an added token."""
    tokenizer |= {"pre_tokenizer": LEVEL, "decoder": LEVEL, "post_processor": LEVEL}
    tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    tokenizer["model"]["vocab"][END] = SIZE
    add(END)(tokenizer)


def add(content: str, **options: bool) -> Callable[[dict[str, Any]], None]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    token = {"id": SIZE, "content": content} | dict.fromkeys(names, False) | options
    return lambda tokenizer: tokenizer["added_tokens"].append(token)


PAIRS = {"ours": Subwords(OURS), "gpt2": Subwords(changed(like_gpt2))}
pairs = st.sampled_from(list(PAIRS.values()))
WORDS = ["cat", " the", " ", "\n", "\t", "\r\n", "'s", ",", END, "\u00a0", "\u00e9", "\u4e2d", "\U0001f600", "7"]
words = st.sampled_from(WORDS)
texts = st.text(st.characters(exclude_categories=["Cs"])) | st.lists(words, max_size=30).map("".join)


@given(text=texts | st.text("\u4e2d\u00e9 a", min_size=20), size=st.integers(1, 60), pairs=pairs)
def test_a_text_without_borders_is_cut_in_the_same_places_however_it_is_read(text, size, pairs) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subwords, "_SLICE", 5)
        whole = list(subwords._slices(raw := text.encode()))
        assert "".join(whole) == text and (all(whole) or not text)
        assert max(len(each.encode()) for each in whole) < 9
        ids = [pairs.encode(piece.decode()) for piece in reading.pieces(raw, "bpe", size)]
        np.testing.assert_array_equal(np.concatenate([*ids, []]), pairs.encode(text))


def test_a_text_is_cut_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subwords, "_SLICE", 9)
    assert list(subwords._slices("a  b\n c, d \u00e9 e f1 2".encode())) == ["a  b\n c,", " d \u00e9 e", " f1 2"]


@given(seed=st.integers(0, 99), text=texts, name=st.sampled_from(list(PAIRS)))
def test_renumbered_ids_mean_the_same(seed: int, text: str, name: str) -> None:
    content = {"ours": OURS, "gpt2": changed(like_gpt2)}[name]
    order = random.Random(seed).sample(range(len(PAIRS[name].symbols)), len(PAIRS[name].symbols))
    again = Subwords(renumber(content, order))
    assert again.symbols == tuple(PAIRS[name].symbols[old] for old in order)
    assert [order[i] for i in again.encode(text)] == PAIRS[name].encode(text).tolist()


def test_training_is_reproducible_and_stops_if_the_text_has_no_more_pairs() -> None:
    assert train_bpe(iter([TEXT]), SIZE) == OURS
    assert len(PAIRS["ours"].symbols) == SIZE
    assert len(Subwords(train_bpe([], 999)).symbols) == 256
    # Newlines stand alone, so no other pair is left.
    assert Subwords(train_bpe(["ab abab\n\n", "abab"], 999)).symbols[256:] == ("ab", "abab", "\u0120abab")


def test_pairs_of_text_without_borders_are_counted_in_equal_parts_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps each such part, so their number may not grow with the text."""
    monkeypatch.setattr(subwords, "_PARTS", 50)
    texts = ["".join(chr(0x4E00 + 1000 * which + n % 900) for n in range(200_000)) for which in range(3)]
    kept = list(subwords._for_pairs(texts))
    assert 25 <= len(kept) <= 54 and sum(len(part) > subwords._WORD for part in kept) <= 3, "the ends of the texts"
    assert [sum(part in text for part in kept) >= 8 for text in texts] == [True] * 3, "from all over the text"
    russian = "\u0441\u043b\u043e\u0432\u0430 " * 90_000
    assert "".join(subwords._for_pairs([russian])) == russian, "words are not long"
    words = "some words " * 9000
    assert "".join(subwords._for_pairs([words])) == words, "nothing of a text with borders is left out"


def test_a_pattern_that_explodes_is_a_sentence() -> None:
    step = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    pairs = Subwords(changed(lambda content: content["pre_tokenizer"]["pretokenizers"].insert(0, step)))
    with pytest.raises(Mistake, match="retry-limit"):
        pairs.encode("a" * 60 + "!")


def test_an_added_token_is_one_token_whatever_its_id() -> None:
    for name in ("\uff5cend\uff5c", END):
        tokenizer = changed(add(name))
        order = [SIZE, *range(SIZE)]
        for pairs, expected in ((Subwords(tokenizer), SIZE), (Subwords(renumber(tokenizer, order)), 0)):
            ids = pairs.encode(f"cat{name} cat").tolist()
            assert ids.count(expected) == 1
            assert pairs.token_bytes[expected] == name.encode()


@pytest.mark.parametrize("digits", [9, 18, 5000])
def test_a_huge_id_is_refused_before_memory_is_taken_for_it(digits: int) -> None:
    content = changed(lambda tokenizer: tokenizer["model"]["vocab"].update(zq=SIZE))
    with pytest.raises(ValueError, match="ids are at most 16,777,216"):
        Subwords(re.sub(rf'("zq": ?){SIZE}', rf"\g<1>{'9' * digits}", content))


def test_a_missing_tokenizer_size_or_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"must be a tokenizer\.json"):
        Subwords("{}")
    for size in (256, 1 << 25):
        with pytest.raises(ValueError, match=r"bpe_size must be at least 257 and at most 16,777,216"):
            CorpusConfig(unit="bpe", bpe_size=size)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        Subwords(OURS)
