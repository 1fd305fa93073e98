"""The count of what a training step starts on a GPU."""

from __future__ import annotations

import pytest
import torch
from small_models import VARIANTS, small_model

from benchmarks import launches
from transformer_xl.config.settings import Lengths
from transformer_xl.train.objective import Objective


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_gradients_are_those_of_the_engine(changes: dict[str, object]) -> None:
    model = small_model(**changes)
    ids = torch.arange(48).view(2, 24) % model.config.vocab_size
    lengths = Lengths(tgt_len=24, mem_len=32)
    objective, memory = Objective(model), model.empty_memory(2, lengths)
    found = []
    for run in (lambda loss: launches.backward(loss, model), torch.Tensor.backward):
        model.zero_grad()
        torch.manual_seed(0)
        run(objective(ids, ids.roll(1), memory, lengths)[0])
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_a_step_waits_once_for_the_device(guard: None) -> None:
    counted, parts = launches.count_step("enwik8-12l")
    assert counted.waits == 1
    assert sum(parts.values()) == counted.kernels.total() <= 600
    assert counted.kernels["keys"] == 12 and counted.kernels["zeros_like"] < 10


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"pre_lnorm": True, "relu_output": True}])
def test_a_token_starts_eight_kernels_a_layer_all_in_graphs(changes: dict[str, object], guard: None) -> None:
    few, more = (launches.count_token("enwik8-12l-modern", n_layer=n, gate="none", **changes) for n in (2, 5))
    assert more.kernels.total() - few.kernels.total() == 3 * 8
    assert more.waits == 0 and more.kernels.total() - more.recorded <= 12


@pytest.mark.outside
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_step_keeps_products_and_attention_and_joins_others(guard: None) -> None:
    """In one graph forward and one backward."""
    pytest.importorskip("triton")
    from benchmarks import compiled

    (forward, backward), (_, parts) = compiled.count_compiled("enwik8-small"), launches.count_step("enwik8-small")
    assert (forward["products"], forward["of attention"]) == (5 * 6 + 2, 6), "five a layer, of all positions, softmax"
    assert forward["written by the compiler"] < 8 * 6, "weights are rounded before"
    assert 2 * forward["products"] >= backward["products"] > forward["products"]
    assert sum(forward.values()) + sum(backward.values()) < 0.7 * (parts["forward"] + parts["backward"])
