"""Hashed n-grams: their rows by hand, and training that changes only the rows of its own n-grams."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import small_model, text
from torch.fx.experimental.proxy_tensor import make_fx

from transformer_xl.config.settings import TrainConfig, TransformerXLConfig
from transformer_xl.data.loader import StreamLoader
from transformer_xl.model.ngrams import NgramEmbedding
from transformer_xl.train.step import Trainer

NGRAMS = {"ngrams": (2, 4), "ngram_rows": 997, "ngram_width": 6}
PRIME, BASE = 2**31 - 1, 1_540_483_477


def embedding(vocab_size: int = 7, **sizes: Any) -> NgramEmbedding:
    return NgramEmbedding(TransformerXLConfig(vocab_size=vocab_size, **sizes))


def row_of(tokens: list[int], rows: int) -> int:
    """The hash of the last tokens, in Python's integers; the newest token has the lowest power."""
    return sum((token + 1) * BASE**power for power, token in enumerate(reversed(tokens), start=1)) % PRIME % rows


def test_vectors_by_hand() -> None:
    torch.manual_seed(0)
    module = embedding(ngrams=(1, 2, 5), ngram_rows=97, ngram_width=6, d_model=14, embedding_scale=3.0).double()
    tokens = [250_000, 7, 0, 3, 3, 8]
    found = module(torch.tensor([tokens]), 4)[0]
    assert torch.equal(module.rows_of(torch.tensor([tokens]), 1)[0], module.rows_of(torch.tensor([tokens]), 4)[0, 3:])
    for vector, end in zip(found, range(3, 7), strict=True):
        padded = [-1] * 5 + tokens[:end]  # -1: no token
        rows = [module.table.weight[97 * i + row_of(padded[-n:], 97)] for i, n in enumerate((1, 2, 5))]
        torch.testing.assert_close(vector, 3 * module.projection.weight @ torch.cat(rows))


@given(data=st.data())
def test_a_match_is_what_followed_the_last_earlier_occurrence(data: st.DataObject) -> None:
    """The rows of a table whose width shows the row's number are those that a search in Python finds."""
    tokens = data.draw(st.lists(st.integers(-1, 3), min_size=1, max_size=40))
    tokens.sort(key=lambda token: token >= 0)  # tokens that are none come first; the order of the others stays
    count, window = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 20))
    lengths, document_end = data.draw(st.sampled_from([(1,), (2,), (1, 3)])), data.draw(st.sampled_from([None, 2]))
    sizes = {"match_window": window, "document_end": document_end, "ngram_width": 4, "d_model": 8}
    module = embedding(vocab_size=9, matches=lengths, **sizes)
    documents, expected = list(accumulate(token == document_end for token in tokens)), []
    for end in range(len(tokens) - count, len(tokens)):
        row = []
        for i, n in enumerate(lengths):
            whole = end - n + 1 >= 0 and documents[end - n + 1] == documents[end]
            own = tokens[end - n + 1 : end + 1] if whole else [-1]
            earlier = range(end - 1, max(end - window - 1, n - 2), -1)
            earlier = (p for p in earlier if documents[p - n + 1] == documents[end])
            found = (tokens[p + 1] for p in earlier if -1 not in own and tokens[p - n + 1 : p + 1] == own)
            row.append(10 * i + next(found, -1) + 1)
        expected.append(row)
    rows = torch.tensor([[-1] * len(tokens), tokens])  # each has its own matches
    assert module.rows_of(rows, count)[1].tolist() == expected
    last = module.rows_of(rows, 1)
    assert last[:, 0].tolist() == [list(range(0, 10 * len(lengths), 10)), expected[-1]]
    assert torch.equal(torch.func.vmap(lambda row: module.rows_of(row[None], 1)[0])(rows), last), "without NumPy"


@pytest.mark.parametrize("count", [1, 2])
def test_of_two_earlier_occurrences_the_last_is_the_match(count: int) -> None:
    module = embedding(matches=(1, 2), match_window=9, ngram_width=4)
    assert module.rows_of(torch.tensor([[0, 1, 3, 2, 1, 4, 0, 1]]), count)[0, -1].tolist() == [4 + 1, 8 + 3 + 1]


@pytest.mark.parametrize("count", [1, 2])
def test_equal_hashes_of_other_tokens_are_no_match(count: int) -> None:
    older, newer = 19_108, 70_913
    assert row_of([0, 0], PRIME) == row_of([older, newer], PRIME)
    module = embedding(vocab_size=100_000, matches=(2,), match_window=9, ngram_width=4)
    assert module.rows_of(torch.tensor([[0, 0, 7, older, newer]]), count)[0, -1].item() == 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_recorded_lookup_finds_the_rows_of_other_tokens(count: int) -> None:
    module = embedding(ngrams=(2,), matches=(2,), match_window=9, ngram_width=4)
    tokens = torch.tensor([[0, 1, 2, 0, 1]])
    recorded = make_fx(lambda tokens: module.rows_of(tokens, count))(torch.zeros_like(tokens))
    assert torch.equal(recorded(tokens), module.rows_of(tokens, count))


def test_only_the_rows_that_are_asked_for_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    module, counts = embedding(**NGRAMS, matches=(2,), d_model=14), []
    tokens, look_up = torch.randint(-1, 7, (16, 9)), module.rows_of
    monkeypatch.setattr(module, "rows_of", lambda tokens, count: counts.append(len(tokens)) or look_up(tokens, count))
    only = torch.tensor([11, 3])
    assert torch.equal(module(tokens, 1, only)[only], module(tokens, 1)[only]), "the same bits"
    assert counts == [2, 16]


def test_dropout_leaves_out_whole_n_grams_and_only_in_training() -> None:
    torch.manual_seed(0)
    sizes = {"ngrams": (1, 2, 5), "ngram_rows": 97, "ngram_width": 6, "d_model": 24, "vocab_size": 5}
    module = embedding(**sizes, matches=(2,), match_window=9, ngram_dropout=0.25, embedding_scale=1.0).double()
    torch.nn.init.eye_(module.projection.weight)
    tokens = torch.randint(5, (64, 70))
    whole, dropped = module.eval()(tokens, 64), module.train()(tokens, 64)
    factors = (dropped / whole).unflatten(-1, (4, 6))
    assert (factors[..., 3, :] == 1).all(), "matches stay"
    factors = factors[..., :3, :]
    torch.testing.assert_close(factors, factors[..., :1].expand_as(factors))
    kept = factors[..., 0] > 0.5
    torch.testing.assert_close(factors[..., 0], kept.double() / 0.75)
    assert abs(kept.double().mean().item() - 0.75) < 6 * (0.25 * 0.75 / kept.numel()) ** 0.5


def trainer(**changes: object) -> Trainer:
    config = TrainConfig(tgt_len=5, mem_len=5, batch_size=2, lr=0.01, device="cpu", precision="fp32", backend="strided")
    model = small_model(train=True, **NGRAMS)
    return Trainer(model, StreamLoader(text(1, 400)[0].numpy(), batch_size=2, tgt_len=5), replace(config, **changes))


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_a_step_changes_the_rows_of_its_own_n_grams(optimizer: str) -> None:
    training = trainer(optimizer=optimizer)
    table = training.model.ngrams.table.weight[997:]
    before = table.detach().clone()
    training.advance()
    ids = training.loader.segment(0).ids
    own = {row_of(([-1] * 4 + row[: end + 1])[-4:], 997) for row in ids.tolist() for end in range(5)}
    assert set((table != before).any(1).nonzero().flatten().tolist()) == own
    step = (table - before)[sorted(own)].abs()  # Adagrad's first step of a weight is its rate
    torch.testing.assert_close(step, torch.full_like(step, 0.1), rtol=1e-3, atol=0)


def test_dense_gradients_of_the_table_train_the_same_weights() -> None:
    few, all_rows = trainer(), trainer()
    assert few.model.ngrams.table.sparse
    all_rows.model.ngrams.table.sparse = False
    for _ in range(5):
        assert few.advance().grad_norm == pytest.approx(all_rows.advance().grad_norm)
    torch.testing.assert_close(few.model.state_dict(), all_rows.model.state_dict())
