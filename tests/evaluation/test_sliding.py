"""`Sliding`: the tokens that each prediction sees, for any segmentation and any other rows of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import BASELINES, VARIANTS, lengths, read, small_model, text

from transformer_xl.evaluation.sliding import Sliding

CALL = lengths(0, tgt_len=5)
sizes = st.integers(1, 6).flatmap(lambda context: st.tuples(st.just(context), st.integers(1, context)))
cuts = st.sampled_from([[17], [1] * 17, [3] * 5 + [2], [7, 1, 1, 8]])


def seen(t: int, context: int, stride: int) -> int:
    """The number of tokens that the prediction after token t (from 0) should see."""
    return min(t + 1, context - stride + 1 + t % stride)


def alone(model: Any, row: torch.Tensor, context: int, stride: int) -> torch.Tensor:
    """Features of each position, computed from only the tokens that it sees; equally long inputs share a call."""
    counts = [seen(t, context, stride) for t in range(len(row))]
    found = torch.empty(len(row), model.config.d_model, dtype=torch.float64)
    for count in set(counts):
        places = [t for t, other in enumerate(counts) if other == count]
        with torch.no_grad():
            windows = torch.stack([row[t + 1 - count : t + 1] for t in places])
            found[places] = model.hidden(windows, None, CALL)[0][:, -1]
    return found


@settings(max_examples=examples(18))
@given(sizes=sizes, pieces=cuts, kind=st.sampled_from([*VARIANTS.values(), *BASELINES.values(), {"kind": "lstm"}]))
def test_each_prediction_sees_the_documented_number_of_tokens(sizes, pieces, kind) -> None:
    model, ids = small_model(**kind), text(2, 17)
    expected = torch.stack([alone(model, row, *sizes) for row in ids])
    torch.testing.assert_close(read(Sliding(model, *sizes), ids, CALL, pieces=pieces).hidden, expected)


@settings(max_examples=examples(6))
@given(sizes=sizes, data=st.data())
def test_rows_can_be_padded_reset_and_selected(sizes: tuple[int, int], data: st.DataObject) -> None:
    model, ids = small_model(), text(3, 13)
    sliding = Sliding(model, *sizes)
    padding = data.draw(st.lists(st.integers(0, 5), min_size=3, max_size=3))
    reset = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    order = data.draw(st.permutations(range(3)))
    with torch.no_grad():
        late, state = sliding.hidden(ids[:, :6], sliding.empty_memory(3, CALL, -torch.tensor(padding)), CALL)
        state = state.reset(torch.tensor(reset)).select(torch.tensor(order))
        later, _ = sliding.hidden(ids[order, 6:], state, CALL)
    for row, pad in enumerate(padding):
        torch.testing.assert_close(late[row, pad:], alone(model, ids[row, pad:6], *sizes))
    for found, row in zip(later, order, strict=True):
        start = 6 if reset[row] else padding[row]
        torch.testing.assert_close(found, alone(model, ids[row, start:], *sizes)[6 - start :])


@pytest.mark.parametrize("last", [1, 3])
def test_the_last_predictions_read_their_own_windows_only(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small_model(), text(2, 11)
    sliding, read_rows = Sliding(model, 5), []
    whole = sliding.log_probs(ids, None, CALL)[0][:, -last:]
    plain = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, *rest: read_rows.append(len(ids)) or plain(ids, *rest))
    torch.testing.assert_close(sliding.log_probs(ids, None, CALL, last)[0], whole)
    assert read_rows == [2 * last]


def test_batches_and_state_have_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small_model(), text(2, 40)
    sliding, shapes = Sliding(model, 5, 2), []
    whole, state = sliding.hidden(ids, None, CALL)
    assert state.ids.shape == (2, 4) and state.seen.tolist() == [40, 40]
    plain = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, *rest: shapes.append(ids.shape) or plain(ids, *rest))
    monkeypatch.setattr("transformer_xl.evaluation.sliding._TOKENS", 23)
    torch.testing.assert_close(sliding.hidden(ids, None, CALL)[0], whole)
    assert max(rows * width for rows, width in shapes) <= 23 and len(shapes) == 10


def test_distances_are_clamped_to_clamp_len() -> None:
    model, ids = small_model(), text(1, 6)
    with torch.no_grad():
        near, far = (Sliding(model, 6, 6).hidden(ids, None, lengths(0, clamp_len=c))[0] for c in (2, None))
        expected, _ = model.hidden(ids, None, lengths(0, clamp_len=2))
    torch.testing.assert_close(near, expected)
    assert not torch.allclose(near[0, -1], far[0, -1])


@pytest.mark.parametrize("stride", [0, 6])
def test_a_stride_that_leaves_gaps_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match=f"from 1 to their width, 5 tokens, got {stride}"):
        Sliding(small_model(), 5, stride)
