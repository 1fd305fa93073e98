"""`Memory` keeps the newest layer inputs of each row, detached, and its rows are independent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import lengths, read, small_model, text, used
from torch import Tensor

from transformer_xl.mistake import Mistake
from transformer_xl.model.memory import Memory
from transformer_xl.model.step import VectorStep

N_LAYER, BATCH, D_MODEL = 2, 3, 5


def inputs(length: int, batch: int = BATCH, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, length, D_MODEL, generator=generator) for _ in range(N_LAYER))


def rows_of(memory: Memory) -> list[list[Tensor]]:
    """The positions that count, for each row and layer."""
    held = [max(0, count) for count in used(memory)]
    return [[x[row, memory.length - count :] for x in memory.layers] for row, count in enumerate(held)]


@given(
    parts=st.lists(
        st.integers(0, 5).flatmap(lambda m: st.tuples(st.just(m), st.integers(1, 3), st.none() | st.integers(-2, m))),
        min_size=1,
        max_size=3,
    )
)
def test_cat_keeps_every_row(parts: list[tuple[int, int, int | None]]) -> None:
    memories = [
        Memory(inputs(length, batch, seed), None if valid is None else torch.full((batch,), valid))
        for seed, (length, batch, valid) in enumerate(parts)
    ]
    joined = Memory.cat(memories)
    assert joined.length == max(length for length, _, _ in parts)
    assert used(joined) == [count for memory in memories for count in used(memory)]
    expected = [row for memory in memories for row in rows_of(memory)]
    torch.testing.assert_close(rows_of(joined), expected, rtol=0, atol=0)
    backwards = torch.arange(len(expected)).flip(0)
    torch.testing.assert_close(rows_of(joined.select(backwards)), expected[::-1], rtol=0, atol=0)


@pytest.mark.unchecked
@pytest.mark.parametrize("kind", ["memory", "cache", "step"])
def test_rows_to_reset_are_marks_of_any_kind_and_nothing_else(kind: str) -> None:
    model, call = small_model(), lengths(7)

    def state():
        memory = read(model, text(2, 5), call).memory
        if kind == "memory":
            return memory
        cache = model.cached(memory, call)
        return cache if kind == "cache" else VectorStep(model.backbone, cache, call)

    for marks in (torch.tensor([True, False]), np.array([True, False]), [True, False]):
        found = state()
        found = found if (after := found.reset(marks)) is None else after
        assert found.counts.tolist() == [0, 5]
    for other in ([0], [0, 1], torch.tensor([1.0, 0.0]), torch.tensor([1, 0], dtype=torch.uint8), [True]):
        with pytest.raises(Mistake, match="rows must be true or false for each of 2 rows"):
            state().reset(other)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "valid", [torch.tensor([1]), torch.ones(2), torch.ones(2, dtype=torch.bool), torch.ones(2).char()]
)
def test_what_counts_is_an_integer_for_each_row(valid: Tensor) -> None:
    model, call = small_model(), lengths(7)
    with pytest.raises(
        Mistake, match=r"valid of the memory must be an int64 or int32 for each of 2 rows, got \[[12]\]"
    ):
        read(model, text(2, 5), call, memory=model.empty_memory(2, call, valid))


def test_states_are_joined_with_the_tokens_of_all_or_none() -> None:
    model, call = small_model(ngrams=(2,)), lengths(7)
    memories = [model.empty_memory(2, call), model.backbone.empty_memory(3, call)]
    for states in (memories, memories[::-1], []):
        with pytest.raises(Mistake, match=f"the tokens of all or none, got {len(states)}"):
            Memory.cat(states)


@pytest.mark.unchecked
def test_padding_stays_padding_after_a_reset() -> None:
    memory = Memory((torch.ones(2, 0, 4),), torch.tensor([-2, -1]))
    assert memory.reset([True, False]).counts.tolist() == [-2, -1]


def test_a_saved_memory_is_loaded_without_executing_code(tmp_path: Path) -> None:
    memory = Memory((torch.ones(2, 3, 4),), torch.tensor([1, 3]))
    torch.save(memory, tmp_path / "memory.pt")
    again = torch.load(tmp_path / "memory.pt", weights_only=True)
    assert isinstance(again, Memory) and torch.equal(again.layers[0], memory.layers[0])
    assert torch.equal(again.counts, memory.counts)


def test_a_printed_state_has_shapes_instead_of_numbers() -> None:
    """A notebook prints the last value of a cell."""
    model = small_model(ngrams=(2,)).eval()
    with torch.no_grad():
        memory = model.hidden(torch.zeros(2, 5, dtype=torch.long), None, lengths(7))[1]
        cache = model.cached(memory, lengths(7))
    shown = f"Memory(layers of {[list(x.shape) for x in memory.layers]}, valid=None, zero_filled=False)"
    assert repr(memory) == shown and "length=5, valid=None" in repr(cache) and "tensor" not in repr(cache)
    assert "layers of ['leaf']" in repr(Memory(("leaf",)))  # type: ignore[arg-type]  # what a map of a tree may make
