"""Sampling filters, the stream of ids, and text, for any probabilities of the model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import small_model
from table_model import TableModel

from transformer_xl.config.settings import Lengths
from transformer_xl.data.subwords import train_bpe
from transformer_xl.data.vocab import Vocab
from transformer_xl.evaluation.generate import (
    Sampling,
    TokenText,
    _nucleus,
    generate,
    next_token_probs,
    sample,
    stream,
    stream_text,
)
from transformer_xl.mistake import Mistake
from transformer_xl.model.step import Step

GREEDY = Sampling(temperature=0)
LENGTHS = Lengths(tgt_len=5, mem_len=7)


def transformer():
    return small_model(vocab_size=7, dropout=0.3, cutoffs=(3,))


def without_padding():
    return small_model(vocab_size=7, zero_memory=True)


def prompt(length: int, seed: int = 0, vocab_size: int = 7) -> np.ndarray:
    return np.random.default_rng(seed + length).integers(0, vocab_size, length)


def ids_of_rows(model, prompts, sampling, max_tokens, lengths=LENGTHS, **options) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, lengths, sampling, max_tokens, **options):
        for row, new in step:
            rows[row].append(new)
    return rows


def rows_of_scores(rows: int, symbols: int):
    """Scores with few different values, so that equal scores are common."""
    score = st.sampled_from([-3.0, -1.0, -0.5, 0.0, 2.0])
    return st.lists(st.lists(score, min_size=symbols, max_size=symbols), min_size=rows, max_size=rows)


@given(rows_of_scores(2, 11), st.integers(1, 13), st.sampled_from([0.3, 1.0, 2.5]))
def test_top_k_keeps_exactly_the_k_likeliest_and_prefers_lower_ids(scores, k, temperature):
    log_probs = torch.tensor(scores).log_softmax(-1)
    probs = next_token_probs(log_probs, Sampling(top_k=k, temperature=temperature))
    order = log_probs.argsort(dim=1, descending=True, stable=True)[:, :k]
    kept = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, order, True)
    assert torch.equal(probs > 0, kept)
    expected = (log_probs.double() / temperature).masked_fill(~kept, -torch.inf).softmax(-1)
    torch.testing.assert_close(probs, expected)


@given(rows_of_scores(2, 11), st.floats(0.01, 0.99), st.sampled_from([0, 4]))
def test_top_p_keeps_the_smallest_set_with_probability_p_of_what_top_k_left(scores, p, top_k):
    log_probs = torch.tensor(scores, dtype=torch.float64).log_softmax(-1)
    whole = next_token_probs(log_probs, Sampling(top_k=top_k))
    probs = next_token_probs(log_probs, Sampling(top_k=top_k, top_p=p))
    for before, after in zip(whole, probs, strict=True):
        kept = before[after > 0]
        torch.testing.assert_close(after[after > 0], kept / kept.sum())
        rounding = 1e-12
        assert kept.sum() >= p - rounding
        assert kept.sum() - kept.min() < p + rounding, "a smaller set would do"
        assert kept.min() >= before[after == 0].max() if (after == 0).any() else True


@given(rows_of_scores(2, 11), st.floats(0.01, 0.99), st.integers(1, 10))
def test_top_p_finds_the_same_bits_among_the_likeliest_tokens(scores, p, count):
    probs = torch.tensor(scores, dtype=torch.float64).softmax(-1)
    assert torch.equal(_nucleus(probs, p, count), _nucleus(probs, p, 11))


def test_samples_follow_the_distribution():
    probs = torch.tensor([0.05, 0.5, 0.0, 0.15, 0.3])
    generators = Sampling(seed=11).generators(1) * 20_000
    drawn = sample(probs.log().expand(20_000, 5), Sampling(top_k=0), generators)
    counts = torch.bincount(drawn, minlength=5)
    assert counts[2] == 0
    torch.testing.assert_close(counts / 20_000, probs, atol=0.015, rtol=0)  # over 4 standard deviations


def test_tokens_without_probability_are_never_drawn(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, dtype, **_: torch.zeros(size, dtype=dtype))
    drawn = sample(torch.tensor([[0.0, 0.0, 0.4, 0.6]]).log(), Sampling(), Sampling(seed=1).generators(1))
    assert drawn.tolist() == [2]


def test_what_is_forbidden_is_never_drawn_and_a_bias_is_added():
    scores = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    found = next_token_probs(scores, Sampling(top_k=0, forbid=(2, 5), bias=((0, 1.5), (2, 9.0))))
    moved = scores.double()
    moved[:, 0] += 1.5
    moved[:, [2, 5]] = -torch.inf
    torch.testing.assert_close(found, moved.softmax(1))
    with pytest.raises(Mistake, match="must leave a token"):
        next_token_probs(scores, Sampling(forbid=tuple(range(7))))
    with pytest.raises(Mistake, match="ids from 0 to 6, got 7"):
        next_token_probs(scores, Sampling(forbid=(7,)))


def test_each_row_follows_what_is_allowed_after_its_own_ids():
    """A grammar: ids grow by one, and begin anew after 6."""
    allow = lambda drawn: [(drawn[-1] + 1) % 7] if drawn else [2, 4]  # noqa: E731
    rows = ids_of_rows(transformer(), [prompt(3), prompt(9)], Sampling(allow=allow, seed=1), 8)
    for ids in rows:
        assert ids[0] in (2, 4) and all(b == (a + 1) % 7 for a, b in pairwise(ids))


def test_ids_that_the_vocabulary_lacks_are_not_allowed():
    for wrong in (-1, 7):
        with pytest.raises(Mistake, match=rf"allow must return ids from 0 to 6, got \[{wrong}\]"):
            ids_of_rows(transformer(), [prompt(3)], Sampling(allow=lambda _, i=wrong: [i]), 2)


def test_nothing_of_a_character_that_begins_in_the_token_of_a_stop_string_is_written():
    vocab = Vocab.of_tokenizer(train_bpe(["na\u00ef na\u00ef "] * 99, 300))
    broken = next(i for i, raw in enumerate(vocab.token_bytes) if raw.endswith(b"a\xc3"))
    writer = TokenText(vocab, np.array([0]), ["a"])
    assert (writer.write(broken), writer.ended, writer.close()) == (vocab.token_bytes[broken][:-2].decode(), True, "")


def test_nan_probabilities_raise_an_error():
    with pytest.raises(FloatingPointError, match="nan"):
        sample(torch.tensor([[0.0, float("nan")]]), Sampling(), Sampling(seed=1).generators(1))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=7)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("make", [TableModel, transformer, without_padding], ids=lambda make: make.__name__)
@pytest.mark.parametrize("lengths", [LENGTHS, Lengths(tgt_len=3, mem_len=20), Lengths(tgt_len=4, mem_len=1)], ids=str)
def test_a_batch_of_unequal_prompts_equals_each_prompt_alone(make, sampling, lengths):
    model = make()
    prompts = [prompt(length) for length in (1, 17, 5, 6, 2)]
    together = ids_of_rows(model, prompts, sampling, 12, lengths)
    for row, one in enumerate(prompts):
        own = sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + row)
        assert ids_of_rows(model, [one], own, 12, lengths) == [together[row]]


@pytest.mark.parametrize("make", [TableModel, transformer], ids=["table", "transformer"])
@pytest.mark.parametrize("lives", [(4, 30, 1), (1, 4, 30), (30, 1, 4)], ids=str)
def test_rows_may_end_before_other_rows(make, lives):
    model, sampling = make(), Sampling(seed=7)
    prompts = [prompt(length) for length in (3, 8, 4)]
    whole = ids_of_rows(model, prompts, sampling, 30)
    got = [0, 0, 0]

    def ended(row: int) -> bool:
        got[row] += 1
        return got[row] >= lives[row]

    cut = [text[:life] for text, life in zip(whole, lives, strict=True)]
    assert ids_of_rows(model, prompts, sampling, 30, ended=ended) == cut


def test_nothing_is_computed_after_all_rows_ended():
    model = TableModel()
    steps = list(stream(model, [prompt(2), prompt(3)], LENGTHS, GREEDY, 50, ended=lambda row: True))
    assert len(steps) == len(model.calls) == 1


def test_prompts_are_read_in_segments_and_tokens_one_by_one():
    model = TableModel()
    ids_of_rows(model, [prompt(12), prompt(3)], GREEDY, 4)
    assert model.calls == [(2, 2), (2, 5), (2, 5), (2, 1), (2, 1), (2, 1)]


@pytest.mark.parametrize(("size", "mem_len"), [(13, 6), (3, 20)])
def test_one_token_at_a_time_equals_one_call_over_the_whole_text(size, mem_len):
    model = transformer()
    lengths = Lengths(tgt_len=5, mem_len=mem_len, attn_len=7)
    (new,) = ids_of_rows(model, [prompt(size)], GREEDY, 20, lengths)
    text = torch.tensor([*prompt(size).tolist(), *new])
    with torch.no_grad():
        log_probs, _ = model.log_probs(text[None, :-1], None, lengths)
    assert log_probs[0, size - 1 :].argmax(-1).tolist() == new


def test_a_memory_longer_than_the_text_costs_nothing(monkeypatch):
    def step_state(model, past, lengths):  # steps even where the kernel in C++ cannot run
        return past if isinstance(past, Step) else Step(model, past, lengths)

    monkeypatch.setattr("transformer_xl.evaluation.generate.step_state", step_state)
    model, prompts = transformer(), [prompt(12)]
    whole = Lengths(tgt_len=5, mem_len=40)
    for longest in (replace(whole, mem_len=1 << 31), Lengths(tgt_len=5, mem_len=1 << 31, attn_len=1 << 31)):
        assert ids_of_rows(model, prompts, GREEDY, 9, longest) == ids_of_rows(model, prompts, GREEDY, 9, whole)


def test_rows_are_drawn_the_same_in_parts(monkeypatch):
    scores, sampling = torch.randn(5, 7).log_softmax(-1), Sampling(seed=3)
    whole = sample(scores, sampling, sampling.generators(5))
    monkeypatch.setattr("transformer_xl.evaluation.generate._SCORES", 14)
    assert torch.equal(sample(scores, sampling, sampling.generators(5)), whole)


def test_the_model_keeps_its_mode_and_gradients_between_tokens():
    model = TableModel().train()
    steps = stream(model, [prompt(2)], LENGTHS, GREEDY, 5)
    for _ in range(3):
        next(steps)
        assert model.training and torch.is_grad_enabled()
    del steps
    assert model.training


BYTES = Vocab.build("byte", [])
TEXT = "the cat sat on a mat\nthé cät ßat on 日本語 🎉\n\n"
CHARS = Vocab.build("char", [TEXT])
WORDS = Vocab.build("word", [TEXT])
VOCABS = pytest.mark.parametrize("vocab", [BYTES, CHARS, WORDS], ids=["byte", "char", "word"])


class Script(TableModel):
    """A model that generates the given ids, one per call, for any input."""

    def __init__(self, vocab: Vocab, ids: np.ndarray):
        super().__init__(len(vocab))
        self.script = iter(ids.tolist())

    def log_probs(self, ids, memory, lengths, last=None):
        log_probs = torch.full((len(ids), 1, self.table.shape[-1]), -9.0)
        log_probs[:, :, next(self.script)] = 0.0
        return log_probs, memory


def pieces_of(vocab: Vocab, start: str, text: str, stop: tuple[str, ...] = (), cut: int = 0) -> list[str]:
    """The pieces that `stream_text` yields if the model writes `text` after `start`, without the last `cut` tokens."""
    new = vocab.encode(start + text)[len(vocab.encode(start)) :]
    sampling = Sampling(temperature=0, stop=stop)
    lengths = Lengths(tgt_len=64, mem_len=1)
    return [piece for _, piece in stream_text(Script(vocab, new), vocab, [start], lengths, sampling, len(new) - cut)]


def test_a_character_of_several_bytes_is_shown_whole_or_replaced():
    assert pieces_of(BYTES, "x", "é日🎉a") == ["é", "日", "🎉", "a"]
    assert pieces_of(BYTES, "x", "a🎉", cut=2) == ["a", "\ufffd"], "the last token is inside a character"


@VOCABS
@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (("t on",), "sa"),
        (("mat\n",), "sat on a "),
        (("\n",), "sat on a mat"),
        (("é c", "\nthé"), "sat on a mat"),
        (("nowhere", "a mau"), "sat on a mat\nthé cat\n\non 日本語 🎉"),
        (("sat", "s"), ""),
        (("at", "sa"), ""),
        (("sat", "a"), "s"),
    ],
)
def test_a_row_ends_before_the_first_stop_string(vocab, stop, kept):
    """Without a stop string the pieces join to the generated text."""
    pieces = pieces_of(vocab, "the\n", "sat on a mat\nthé cat\n\non 日本語 🎉", stop)
    assert "".join(pieces) == kept and "" not in pieces


def test_a_possible_start_of_a_stop_string_is_held_back():
    assert pieces_of(CHARS, "the\n", "aaasat", ("aas",)) == ["a"]
    assert pieces_of(CHARS, "the\n", "aaon", ("aas",)) == ["aao", "n"]
    assert pieces_of(CHARS, "the\n", "aa", ("aas",)) == ["aa"]


@VOCABS
def test_an_empty_prompt_starts_a_line(vocab):
    model = TableModel(len(vocab))
    behind_line_end = generate(model, vocab, ["\n"], LENGTHS, GREEDY, 6)
    assert generate(model, vocab, [""], LENGTHS, GREEDY, 6) == behind_line_end


def test_an_empty_prompt_without_line_ends_starts_after_the_most_frequent_token():
    vocab = Vocab.build("char", ["abracadabra\n"], newlines="drop")
    model = TableModel(len(vocab))
    assert generate(model, vocab, ["\n"], LENGTHS, GREEDY, 6) == generate(model, vocab, ["a"], LENGTHS, GREEDY, 6)


def test_without_a_memory_each_token_depends_on_the_last_tgt_len_tokens():
    model, ids = small_model(train=False), [3, 1, 4, 1, 5, 2, 6]
    lengths = Lengths(tgt_len=4, mem_len=0)
    steps = stream(model, [np.array(ids)], lengths, Sampling(temperature=0), 5)
    for step in steps:
        log_probs, _ = model.log_probs(torch.tensor([ids[-4:]]), None, lengths, last=1)
        [(_, new)] = step
        assert new == log_probs.argmax().item()
        ids.append(new)
