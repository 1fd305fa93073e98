"""`LanguageModel`: cutting a text changes nothing, a context does not change, probabilities agree with `txl score`."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model

from transformer_xl import LanguageModel
from transformer_xl.config.settings import EvalConfig, Lengths, RunConfig, TrainConfig
from transformer_xl.data.vocab import Vocab
from transformer_xl.evaluation.generate import Context
from transformer_xl.evaluation.lines import score_lines
from transformer_xl.mistake import Mistake

WORDS = Vocab("word", ("<eos>", "<unk>", "a", "bird", "sang", "twice"))
CHARS = Vocab("char", ("\n", "a", "b", "é", "<unk>"))
BYTES = Vocab.build("byte", [])
WINDOW = {"tgt_len": 5, "mem_len": 6, "attn_len": 7}
"""Lengths at which a result does not depend on where a text is cut."""


def language_model(vocab: Vocab = BYTES, lengths: dict[str, Any] = WINDOW, **shape: Any) -> LanguageModel:
    model = small_model(vocab_size=len(vocab), **shape)
    return LanguageModel(model, vocab, RunConfig(model=model.config, train=TrainConfig(**lengths)))


KINDS = {
    "bytes": language_model(),
    "characters": language_model(CHARS),
    "zeros at the start": language_model(zero_memory=True),
    "a memory of all": language_model(lengths={"tgt_len": 5, "mem_len": 100}),
    "no memory": language_model(lengths={"tgt_len": 7, "mem_len": 0}),
    "n-grams": language_model(ngrams=(2,), matches=(3,)),
    "lstm": language_model(kind="lstm", lengths={"tgt_len": 5, "mem_len": 1}),
}


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
@settings(max_examples=examples(15))
@given(st.text("abé\n", max_size=30), st.data())
def test_a_text_may_be_scored_in_pieces(model, text, data):
    cut = data.draw(st.integers(0, len(text)))
    whole, first = model.score(text), model.score(text[:cut])
    rest = model.score(text[cut:], first.context)
    np.testing.assert_allclose([*first.nats, *rest.nats], whole.nats, rtol=1e-9, atol=1e-12)
    assert "".join(whole.tokens) == "".join([*first.tokens, *rest.tokens]) == text
    assert whole.bytes == first.bytes + rest.bytes == len(text.encode())


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
def test_a_saved_context_is_loaded_without_executing_code(model: LanguageModel, tmp_path: Path) -> None:
    context = model.score("abba", model.score("ab\na" * 5).context).context
    torch.save(context, tmp_path / "context.pt")
    again = torch.load(tmp_path / "context.pt", weights_only=True)
    assert type(again) is Context and again[1:] == context[1:]
    assert model.score("b\na", again).nats.tolist() == model.score("b\na", context).nats.tolist()
    how = {"max_tokens": 20, "temperature": 0}
    assert model.generate("b", again, **how) == model.generate("b", context, **how)


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
def test_text_after_a_context_is_the_text_after_one_prompt(model):
    before = "abba" * 10
    context = model.score(before).context
    prompt = "" if model.vocab.line_end is None else "\n"
    how = {"max_tokens": 20, "seed": 1, "top_k": 0}  # drawn, because a likeliest token rarely depends on what is far
    whole = model.generate(f"{prompt}{before}ba", **how)
    assert model.generate("ba", context, **how) == whole
    assert "".join(model.stream("ba", context, **how)) == whole
    costs = model.score("ba", context).nats
    model.next_tokens("a", context)
    np.testing.assert_array_equal(model.score("ba", context).nats, costs, "a context does not change")


def test_a_character_may_begin_before_the_end_of_a_context():
    model, raw = language_model(), "\u754c".encode()
    for cut in (1, 2):
        context = model.score(b"ab" + raw[:cut]).context
        again = model.score(raw[cut:], context)
        assert "".join(again.tokens) == "\u754c"
        empty = model.score(b"", context).context
        assert "".join(model.score(raw[cut:], empty).tokens) == "\u754c"
        rest = tuple((i, 99.0) for i in raw[cut:])
        if cut == 2:
            assert model.generate("", context, max_tokens=1, bias=rest) == "\u754c"
            assert model.next_tokens("", context, count=256)[0][0]
            assert any(token == "\u754c" for token, _ in model.next_tokens("", context, count=256))


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
def test_the_probabilities_of_the_next_token_are_those_of_its_score(model):
    context = model.score("ab").context
    following = model.next_tokens("b", context, count=1000)
    assert len(following) == len(model.vocab)
    assert sum(p for _, p in following) == pytest.approx(1)
    assert [p for _, p in following] == sorted((p for _, p in following), reverse=True)
    [probability] = [p for token, p in following if token == "a"]
    assert model.score("ba", context).nats[-1] == pytest.approx(-math.log(probability))
    assert len(model.next_tokens("b", context)) == min(10, len(model.vocab))


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
def test_a_list_gives_what_each_text_gives(model: LanguageModel) -> None:
    """Texts of any length, also empty and longer than a segment; their contexts go on as those of one text."""
    texts = ["ab", "", "b" * 17, "a", "abba"]
    for ours, theirs in zip(model.score(texts), map(model.score, texts), strict=True):
        assert ours.tokens == theirs.tokens and ours.bytes == theirs.bytes
        np.testing.assert_allclose(ours.nats, theirs.nats, rtol=1e-9)
        more = [model.score("ba", each.context).nats for each in (ours, theirs)]
        np.testing.assert_allclose(*more, rtol=1e-9)
    for ours, theirs in zip(model.next_tokens(texts, count=3), map(model.next_tokens, texts), strict=True):
        assert [name for name, _ in ours] == [name for name, _ in theirs[:3]]
    written = model.generate(texts, max_tokens=6, seed=5, stop=("b",))
    assert written == [model.generate(each, max_tokens=6, seed=5 + row, stop=("b",)) for row, each in enumerate(texts)]
    assert model.score([]) == [] and model.next_tokens([]) == [] and model.generate([]) == []


def test_a_line_costs_what_txl_score_says():
    for vocab, line in ((WORDS, "a bird sang a cat"), (BYTES, "aé b"), (CHARS, "aéb")):
        model = language_model(vocab)
        scored = model.score(line + "\n")
        [reference] = score_lines(model, [line], model.config.eval_lengths)
        assert scored.nats.sum() == pytest.approx(reference.nats)
        assert (len(scored.nats), scored.bytes) == (reference.targets, reference.bytes)
        assert scored.ppl == pytest.approx(reference.ppl)
        assert scored.bits_per_byte == pytest.approx(reference.bits_per_byte)


def test_tokens_are_readable():
    assert language_model(WORDS).score("a bird sang\n twice").tokens == ["a", " bird", " sang", "\n", "twice"]
    assert language_model().score("é\n").tokens == ["", "é", "\n"]
    assert repr(language_model().score("ab" * 700)).startswith("ScoredTokens(1,400 tokens, ppl ")  # not all of them


def test_without_a_line_end_the_first_token_is_only_context():
    model = language_model(Vocab("char", ("a", "b"), "drop"))
    assert model.score("ab").tokens == ["b"]
    assert model.score("").tokens == model.score("a").tokens == []
    assert math.isnan(model.score("").ppl)
    assert len(model.score("ab", model.score("").context).nats) == 1


def test_a_text_is_read_at_the_lengths_that_were_asked_for():
    model = language_model(lengths={"tgt_len": 3, "mem_len": 6})
    text = "ab" * 20
    short, longer = model.with_lengths(mem_len=2), model.with_lengths(mem_len=60, tgt_len=1)
    assert isinstance(short, LanguageModel)
    assert short.config.eval_lengths.mem_len == 2 and longer.config.eval_lengths.tgt_len == 1
    assert not np.allclose(short.score(text).nats, longer.score(text).nats)
    context = longer.score("ab").context  # a context keeps its lengths
    np.testing.assert_array_equal(short.score(text, context).nats, longer.score(text, context).nats)
    with pytest.raises(Mistake, match="got window"):
        model.with_lengths(window=2)


def test_what_training_limited_can_be_switched_off():
    model = language_model(lengths=WINDOW | {"clamp_len": 2})
    free = model.with_lengths(clamp_len=None, attn_len=None)
    assert free.config.eval_lengths == Lengths(tgt_len=5, mem_len=6)
    assert model.with_lengths(mem_len=2).config.eval_lengths == Lengths(tgt_len=5, mem_len=2, clamp_len=2)
    assert model.with_lengths(mem_len=6).config.eval_lengths.attn_len == 7  # it fits
    asked = model.with_lengths(attn_len=3)  # not what training limited
    assert asked.with_lengths(mem_len=2).config.eval_lengths.attn_len == 3


def test_a_memory_replaces_the_context_that_is_read_again():
    model = language_model(lengths={"tgt_len": 2, "mem_len": 0, "context_len": 3})
    model = model._replace(config=replace(model.config, eval=EvalConfig(mem_len=0, context_len=3)))
    assert model.score("ab").context.lengths.tgt_len == 5
    found = model.with_lengths(mem_len=4)
    assert found.config.writing_lengths(found.config.eval_lengths) == Lengths(tgt_len=2, mem_len=4)


def test_a_change_of_the_model_changes_its_scores():
    """A hook, or a module that was replaced, after the first call."""
    model = language_model()
    text, layer = "ab ba", model.model.backbone.layers[1]
    before = model.score(text).nats
    handle = layer.register_forward_hook(lambda _, __, out: out + 1.0)
    hooked = model.score(text).nats
    assert not np.allclose(hooked, before)
    fresh = LanguageModel(model.model, model.vocab, model.config)
    np.testing.assert_array_equal(hooked, fresh.score(text).nats)
    handle.remove()
    np.testing.assert_array_equal(model.score(text).nats, before)
    first, before_next = model.model.backbone.layers[0], model.next_tokens(text)
    model.model.backbone.layers[0] = deepcopy(layer)
    assert not np.allclose(model.score(text).nats, before) and model.next_tokens(text) != before_next
    model.model.backbone.layers[0] = first
    np.testing.assert_array_equal(model.score(text).nats, before)


def test_the_least_and_the_most_that_generating_takes():
    model = language_model()
    assert "\n" not in language_model(WORDS).generate("a", forbid=("<eos>",), max_tokens=9)  # id 0
    assert model.generate(b"\xe7", max_tokens=0) == "" and model.generate([]) == []
    raw = "\U0001f600".encode()  # of four bytes
    assert model.generate(raw[:3], bias=((raw[3], 999.0),), max_tokens=1) == "\U0001f600"
    assert model.generate("a", temperature=1e-308, max_tokens=1)
    with pytest.raises(Mistake, match="leave a token"):
        model.generate("a", allow=lambda _: [], max_tokens=1)


def test_scores_are_in_fp32_also_under_autocast():
    model = language_model(dtype=torch.float32)
    text = "ab ba" * 9
    with torch.autocast("cpu", torch.bfloat16):
        inside = model.score(text).nats
    np.testing.assert_array_equal(inside, model.score(text).nats)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda m: m.score(["a", 7]), "A text must be a str or bytes, got int"),
        (lambda m: language_model(CHARS).score(b"\xff"), "text must be UTF-8 text unless the tokens are bytes"),
        (lambda m: m.score(["a"], m.score("b").context), "context must be the context of one .* got a list of texts"),
        (lambda m: m.score("a", language_model(WORDS).score("a").context), "must be of a model with this vocabulary"),
        (lambda m: m.next_tokens("a", "b"), "context must be the context of one scored text, .* got str"),
        (lambda m: m.score(None), "A text must be a str or bytes, got NoneType"),
        (lambda m: m.generate(7), "A text must be a str or bytes, got int"),
        (lambda m: m.next_tokens("a", count=0), "count must be at least 1, got 0"),
        (lambda m: m.generate("a", forbid=("ab",)), "forbid must name tokens of the vocabulary"),
        (lambda m: m.generate("a", bias=((1, math.inf), (1, 0.0))), "bias must be finite numbers"),
        (lambda m: m.generate("a", bias={1: 0.0}), "bias must be a tuple of pairs"),
        (lambda m: m.generate("a", temperature=-0.1), "temperature must be at least 0, got -0.1"),
        (lambda m: m.generate("a", temperature=math.nan), "temperature must be at least 0 and finite, got nan"),
        (lambda m: m.generate("a", temperature=math.inf), "temperature must be at least 0 and finite, got inf"),
        (lambda m: m.generate("a", temperature=-1, top_k=-1, top_p=2), "(?s)temperature.*top_k.*top_p"),
        (lambda m: m.generate("a", top_k=-1), "top_k must be at least 0, got -1"),
        (lambda m: m.generate("a", top_p=0.0), "top_p must be above 0 and at most 1, got 0.0"),
        (lambda m: m.generate("a", stop=("a", "")), "stop must be texts that are not empty"),
        (lambda m: m.generate("a", stop="end"), "stop must be a tuple of texts"),
        (lambda m: m.with_lengths(tgt_len=0), "tgt_len must be at least 1"),
        (lambda m: m.generate("a", max_tokens=-1), "max_tokens must be at least 0, got -1"),
        (lambda m: m.vocab.decode([-1]), "An id must be from 0 to"),
        (lambda m: m.vocab.decode([10**6]), "An id must be from 0 to"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_a_sentence(call, sentence):
    with pytest.raises(Mistake, match=sentence):
        call(language_model())
