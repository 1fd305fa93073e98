"""Streams: joined, they equal the corpus, and every target is scored once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.data.corpus import Split
from transformer_xl.data.loader import Segment, StreamLoader, random_cuts, shifted_copies, shuffled_lines
from transformer_xl.mistake import Mistake

lengths = st.integers(2, 200)
batches = st.integers(1, 9)
segments = st.integers(1, 17)


def read_rows(loader: StreamLoader) -> list[tuple[list[int], list[int]]]:
    """Per row, the ids and targets that are scored, in order."""
    rows: list[tuple[list[int], list[int]]] = [([], []) for _ in range(loader.segment(0).ids.shape[0])]
    for segment in loader:
        for (ids, targets), row_ids, row_targets in zip(rows, segment.ids, segment.targets, strict=True):
            scored = row_targets != -1
            ids += row_ids[scored].tolist()
            targets += row_targets[scored].tolist()
    return rows


def targets_of(loader: StreamLoader, indices: range) -> list[int]:
    return [i for index in indices for i in loader.segment(index).targets.flatten().tolist() if i != -1]


def assert_same(a: Segment, b: Segment) -> None:
    assert torch.equal(a.ids, b.ids) and torch.equal(a.targets, b.targets)
    assert (a.reset is None) == (b.reset is None)
    assert a.reset is None or b.reset is None or torch.equal(a.reset, b.reset)


@given(n=lengths, batch_size=batches, tgt_len=segments)
def test_joined_streams_are_the_corpus(n: int, batch_size: int, tgt_len: int) -> None:
    loader = StreamLoader(np.arange(n, dtype=np.uint8), batch_size=batch_size, tgt_len=tgt_len)
    for index, (ids, targets, reset) in enumerate(loader):
        assert ids.dtype == targets.dtype == torch.int64 and ids.shape == targets.shape and ids.min() >= 0
        assert ids.shape[1] == tgt_len or (index == len(loader) - 1 and ids.shape[1] < tgt_len)
        assert (targets != -1).any(0).all(), "no column is padding alone"
        assert (reset is not None and bool(reset.all())) if index == 0 else reset is None
    rows = read_rows(loader)
    assert [i for ids, _ in rows for i in ids] == list(range(n - 1))
    assert [i for _, targets in rows for i in targets] == list(range(1, n))
    sizes = [len(targets) for _, targets in rows]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert loader.targets == sum(sizes) == n - 1
    assert len(loader) == -(-max(sizes) // tgt_len)


documents = st.lists(st.integers(1, 30), min_size=1, max_size=25).filter(lambda sizes: max(sizes) > 1)


@given(sizes=documents, batch_size=batches, tgt_len=segments)
def test_each_document_starts_a_segment_with_reset(sizes: list[int], batch_size: int, tgt_len: int) -> None:
    ids, starts = np.arange(sum(sizes)), np.cumsum([0, *sizes[:-1]])
    loader = StreamLoader(Split(ids, starts, "train"), batch_size=batch_size, tgt_len=tgt_len)
    rows = [row for _, row in read_rows(loader)]
    targets = [i for row in rows for i in row]
    assert all(row == sorted(row) for row in rows)
    assert sorted(targets) == sorted(set(ids.tolist()) - set(starts.tolist()))
    assert loader.targets == len(targets) == sum(sizes) - len(sizes)
    begun = []
    for index, segment in enumerate(loader):
        for row in range(batch_size):
            scored = segment.targets[row] != -1
            if not scored.any():
                continue
            first = int(segment.ids[row, 0])
            reset = segment.reset is not None and bool(segment.reset[row])
            assert reset == (first in starts)
            assert not set(segment.ids[row, 1:][scored[1:]].tolist()) & set(starts.tolist()), "a document begins inside"
            begun += [first] if reset else []
        if index == 0:
            assert segment.reset is not None and segment.reset.all()
    assert sorted(begun) == [start for start, size in zip(starts.tolist(), sizes, strict=True) if size > 1]
    lasting = [-(-(size - 1) // tgt_len) for size in sizes]
    assert len(loader) <= sum(lasting) / batch_size + max(lasting), "no stream gets much more than its share"


@given(n=lengths, tgt_len=segments, cuts=st.lists(st.integers(1, 7), max_size=3), by_document=st.booleans())
def test_rows_partition_the_batch(n: int, tgt_len: int, cuts: list[int], by_document: bool) -> None:
    options = {"batch_size": 8, "tgt_len": tgt_len, "documents": [0, n // 2] if by_document and n > 3 else None}
    whole = StreamLoader(np.arange(n), **options)
    edges = sorted({0, *cuts, 8})
    parts = [StreamLoader(np.arange(n), rows=slice(a, b), **options) for a, b in pairwise(edges)]
    assert sum(part.targets for part in parts) == whole.targets
    for index, segment in enumerate(whole):
        pieces = [part.segment(index) for part in parts]
        assert torch.equal(torch.cat([piece.ids for piece in pieces]), segment.ids)
        assert torch.equal(torch.cat([piece.targets for piece in pieces]), segment.targets)
        resets = [torch.zeros(len(p.ids), dtype=torch.bool) if p.reset is None else p.reset for p in pieces]
        whole_reset = torch.zeros(8, dtype=torch.bool) if segment.reset is None else segment.reset
        assert torch.equal(torch.cat(resets), whole_reset)
    assert all(len(part) == len(whole) for part in parts)


@given(n=lengths, batch_size=batches, tgt_len=segments, limit=st.integers(1, 250), by_document=st.booleans())
def test_max_tokens_scores_the_first_targets(n, batch_size, tgt_len, limit, by_document) -> None:
    starts = [0, 2] if by_document and n > 3 else None
    loader = StreamLoader(np.arange(n), batch_size=batch_size, tgt_len=tgt_len, max_tokens=limit, documents=starts)
    targets = sorted(targets_of(loader, range(len(loader))))
    possible = [i for i in range(1, n) if starts is None or i != 2]
    assert targets == possible[:limit] and loader.targets == len(targets)


def test_mistakes_are_refused_in_a_sentence() -> None:
    ids = np.arange(10)
    for option in ("batch_size", "tgt_len", "max_tokens"):
        options: dict[str, Any] = {"batch_size": 2, "tgt_len": 2, option: -1}
        with pytest.raises(ValueError, match=f"{option} must be at least [01], got -1"):
            StreamLoader(ids, **options)
    for size in (0, 1):
        with pytest.raises(ValueError, match=f"The valid split must have at least 2 tokens.*got {size}"):
            StreamLoader(Split(ids[:size], None, "valid"), batch_size=1, tgt_len=1)
    with pytest.raises(ValueError, match="nothing to score"):
        StreamLoader(ids[:2], batch_size=1, tgt_len=1, documents=[0, 1])
    with pytest.raises(Mistake, match="must start at 0"):
        StreamLoader(ids, batch_size=1, tgt_len=1, documents=[2, 5])
    with pytest.raises(Mistake, match="shuffle must be None"):
        StreamLoader(ids, batch_size=1, tgt_len=1, shuffle=(0, 1), passes=2)
    with pytest.raises(Mistake, match="count from 0, got -1"):
        StreamLoader(ids, batch_size=1, tgt_len=2).segment(-1)


lines = st.lists(st.lists(st.integers(1, 90), max_size=7), min_size=1, max_size=30)


def lines_of(tokens: list[int]) -> list[tuple[int, ...]]:
    """The lines of a sequence of tokens in which 0 ends a line."""
    found, line = [], []
    for token in tokens:
        line.append(token)
        if token == 0:
            found.append(tuple(line))
            line = []
    return [*found, tuple(line)] if line else found


@given(lines=lines, seed=st.integers(0, 99), ended=st.booleans())
def test_shuffling_keeps_the_lines(lines: list[list[int]], seed: int, ended: bool) -> None:
    tokens = [token for line in lines for token in (*line, 0)] + ([] if ended else [1])
    shuffled = shuffled_lines(np.array(tokens), 0, (seed,))
    read = shuffled[0 : len(tokens)].tolist()
    assert len(shuffled) == len(tokens) and sorted(read) == sorted(tokens)
    assert sorted(lines_of(read)) == sorted(lines_of(tokens))
    assert lines_of(read)[0] == lines_of(tokens)[0], "the first line stays: its first token is context only"
    assert ended or lines_of(read)[-1] == lines_of(tokens)[-1], "otherwise it and the next one were one line"
    for start in range(0, len(tokens), 3):
        assert shuffled[start : start + 5].tolist() == read[start : start + 5]


def test_streams_read_shifted_copies_as_one_text_and_resume_by_index() -> None:
    text = np.arange(20)
    loader = StreamLoader(text, batch_size=2, tgt_len=3, passes=3, seed=5)
    whole = shifted_copies(text, 3, 5)[0:60].tolist()
    assert loader.targets == 59 and [sorted(whole[at : at + 20]) for at in (0, 20, 40)] == 3 * [text.tolist()]
    assert [target for _, targets in read_rows(loader) for target in targets] == whole[1:]
    again = StreamLoader(text, batch_size=2, tgt_len=3, passes=3, seed=5)
    assert torch.equal(again.segment(7).ids, loader.segment(7).ids)
    with pytest.raises(ValueError, match="passes must be 1 where documents"):
        StreamLoader(text, batch_size=2, tgt_len=3, passes=2, documents=[0, 4])


@given(lines=lines, batch_size=batches, tgt_len=segments, seed=st.integers(0, 9))
def test_each_epoch_has_the_same_targets_in_another_order(lines, batch_size, tgt_len, seed) -> None:
    tokens = np.array([0, *(token for line in lines for token in (*line, 0))])
    loader = StreamLoader(tokens, batch_size=batch_size, tgt_len=tgt_len, shuffle=(0, seed))
    for epoch in range(3):
        found = targets_of(loader, range(epoch * len(loader), (epoch + 1) * len(loader)))
        assert sorted(found) == sorted(tokens[1:].tolist())
    again = StreamLoader(tokens, batch_size=batch_size, tgt_len=tgt_len, shuffle=(0, seed))
    index = 2 * len(loader)
    assert_same(loader.segment(index), again.segment(index))


def test_each_epoch_and_seed_has_its_own_order() -> None:
    tokens = np.array([0, *(token for line in range(1, 60) for token in (line, 0))])

    def order(seed: int, epoch: int) -> list[int]:
        loader = StreamLoader(tokens, batch_size=1, tgt_len=len(tokens), shuffle=(0, seed))
        return loader.segment(epoch).targets[0].tolist()

    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@given(n=lengths, batch_size=batches, tgt_len=segments, context_len=st.integers(0, 20), data=st.data())
def test_the_context_is_the_tokens_before_and_every_target_is_scored_once(
    n: int, batch_size: int, tgt_len: int, context_len: int, data: st.DataObject
) -> None:
    starts = [0, n // 2] if n > 3 and data.draw(st.booleans()) else None
    seed = data.draw(st.none() | st.integers(0, 9)) if starts is None else None
    options: dict[str, Any] = {"batch_size": batch_size, "tgt_len": tgt_len, "documents": starts, "random_seed": seed}
    loader = StreamLoader(np.arange(n), context_len=context_len, **options)
    bare = StreamLoader(np.arange(n), **options)
    assert len(loader) == len(bare)
    scored = targets_of(loader, range(len(loader)))
    assert sorted(scored) == sorted(targets_of(bare, range(len(bare)))) and len(scored) == loader.targets
    assert len(scored) == n - (1 if starts is None else 2)
    for segment, new in zip(loader, bare, strict=True):
        for ids, targets, fresh, new_targets in zip(*segment[:2], new.ids, new.targets, strict=True):
            if not (new_targets != -1).any():
                assert (targets == -1).all()
                continue
            begin = int((targets != -1).nonzero()[0])
            begun = int(np.searchsorted(starts or [0], int(fresh[0]), side="right")) - 1
            rows = int(fresh[0]) - (starts or [0])[begun]
            assert begin <= context_len and (begin == context_len or begin <= rows)
            count = begin + int((new_targets != -1).sum())
            assert torch.equal(ids[:count], torch.arange(count) + int(fresh[0]) - begin)
            assert targets[targets != -1].tolist() == new_targets[new_targets != -1].tolist()


@given(n=lengths, batch_size=batches, tgt_len=segments, seed=st.integers(0, 9), index=st.integers(0, 200))
def test_random_lengths_are_new_in_each_epoch_and_depend_on_the_index_alone(
    n, batch_size, tgt_len, seed, index
) -> None:
    def loader() -> StreamLoader:
        return StreamLoader(np.arange(n), batch_size=batch_size, tgt_len=tgt_len, random_seed=seed)

    read = loader()
    begins = [i for i in range(index + 1) if (reset := read.segment(i).reset) is not None and reset.all()]
    assert begins[0] == 0
    for begin, end in pairwise(begins):
        assert sorted(targets_of(read, range(begin, end))) == list(range(1, n))
    assert_same(loader().segment(index), read.segment(index))


@given(n=st.integers(2, 2000), batch_size=batches, tgt_len=st.integers(1, 3), by_document=st.booleans())
def test_short_streams_have_read_the_text_of_long_ones(n, batch_size, tgt_len, by_document) -> None:
    starts = [0, *range(2, n - 1, 17)] if by_document else None
    loader = StreamLoader(np.arange(n), batch_size=batch_size, tgt_len=2 * tgt_len, documents=starts)
    short = loader.short()
    assert (short.batch_size, short.tgt_len, short.targets) == (2 * batch_size, tgt_len, loader.targets)
    assert sorted(targets_of(short, range(len(short)))) == sorted(targets_of(loader, range(len(loader))))
    if not by_document:
        assert len(short) == len(loader)
        for index in range(0, len(loader), 64):
            assert sorted(targets_of(short, range(index))) == sorted(targets_of(loader, range(index)))


def test_random_segment_lengths_have_the_distribution_of_awd_lstm() -> None:
    ends = random_cuts(1_000_000, 70, (1, 2))
    sizes = np.diff(ends, prepend=0)
    assert ends[-1] == 1_000_000 and sizes[:-1].min() >= 5
    short = sizes < 52
    assert short.mean() == pytest.approx(0.05, abs=0.006)
    assert sizes[~short].mean() == pytest.approx(69.5, abs=0.2) and sizes[short].mean() == pytest.approx(34.5, abs=1)
    assert sizes[~short].std() == pytest.approx(5, abs=0.2)
    assert np.diff(random_cuts(10_000, 3, (1, 2)))[:-1].min() == 5
    drawn = [StreamLoader(np.arange(9_999), batch_size=1, tgt_len=70, random_seed=seed) for seed in (1, 2)]
    begin = len(drawn[0])
    widths = [[one.segment(i).ids.shape[1] for i in range(k, k + 9)] for one in drawn for k in (0, begin)][:3]
    assert widths[0] != widths[1] and widths[0] != widths[2], "epochs and seeds have lengths of their own"
    with pytest.raises(ValueError, match="random_tgt_len must be false"):
        StreamLoader(np.arange(9), batch_size=1, tgt_len=3, documents=[0, 4], random_seed=1)
