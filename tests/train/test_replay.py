"""A step recorded as a CUDA graph gives the losses, the gradients and the memory of one that is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from transformer_xl.config.settings import TrainConfig, TransformerXLConfig
from transformer_xl.data.loader import Segment
from transformer_xl.model.step import _capture_graph
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.train import replay
from transformer_xl.train.choices import can_record
from transformer_xl.train.optim import build_optimizers
from transformer_xl.train.step import objective_of, train_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = TransformerXLConfig(
    vocab_size=13, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16, dropout=0.2 * (DEVICE == "cuda"),
    ngrams=(2, 3), ngram_rows=50,
)  # fmt: skip
CONFIG = TrainConfig(
    batch_size=3, tgt_len=5, mem_len=6, max_steps=20, lr=0.01, device=DEVICE, precision="fp32", cuda_graph=True
)


class Graph:
    """What a CUDA graph does, on a CPU: `replay` runs the recorded call again, into the tensors of the recording."""

    recording: Graph | None = None

    def replay(self) -> None:
        before = {p: p.grad for p in self.arguments[0].parameters()}
        for parameter in before:
            parameter.grad = None
        found = self.run(*self.arguments)
        for old, new in zip(pytree.tree_leaves(self.results), pytree.tree_leaves(found), strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)
        for parameter, memory in self.gradients.items():
            for old, new in zip(memory, memory_of(parameter.grad), strict=True):
                old.copy_(new)
        for parameter, gradient in before.items():
            parameter.grad = gradient

    def __init__(self) -> None:
        self.run = replay.forward_backward

    def record(self, *arguments: Any) -> Any:
        self.arguments, self.results = arguments, self.run(*arguments)
        self.gradients = {p: memory_of(p.grad) for p in arguments[0].parameters() if p.grad is not None}
        return self.results


def memory_of(gradient: Any) -> list[Tensor]:
    """What a graph writes of a gradient; a sparse one may get other memory."""
    return [gradient._indices(), gradient._values()] if gradient.is_sparse else [gradient]


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def capture(graph: Graph, pool: object, stream: object) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(replay, "forward_backward", graph.record)
            yield

    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def losses(
    run: Any, *, spoil: int | None = None, compiled: bool = False, sparse: bool = False
) -> tuple[list[float], list[Tensor]]:
    """The losses of ten steps, and the last memory. The gradient of step `spoil` is infinite, and the loss is scaled
    differently from then on. `sparse`: the gradients of n-grams, as `Trainer` sets them."""
    torch.manual_seed(0)
    model = TransformerXL(SHAPE, backend="strided").to(DEVICE).train()
    assert model.ngrams is not None
    model.ngrams.table.sparse = sparse
    objective = objective_of(model, CONFIG)
    if compiled:
        objective.compile(backend="eager")
    optimizers, found = build_optimizers(model, CONFIG), []
    memory = model.empty_memory(CONFIG.batch_size, CONFIG.lengths)
    ids = torch.randint(13, (10, 3, 6))
    for step, segment in enumerate(ids):
        weights = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            next(model.parameters()).mul_(float("inf") if step == spoil else 1)
        call = Segment(segment[:, :-1], segment[:, 1:], None), memory, CONFIG, step
        scale = 4.0 if spoil is not None and step > spoil else 1.0
        result, memory = train_step(model, optimizers, *call, objective=objective, run=run, scale=scale)
        found.append(result.nats)
        if step == spoil:
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), weights)
    return found, [*memory.layers]


@pytest.mark.parametrize(("spoil", "sparse"), [(None, False), (5, False), (5, True)])
def test_replayed_steps_are_the_steps(spoil: int | None, sparse: bool) -> None:
    """After step 5 the loss is scaled, as in fp16."""
    kinds = replay.forward_backward, replay.Replay()
    expected, found = (losses(kind, spoil=spoil, sparse=sparse) for kind in kinds)
    assert str(found[0]) == str(expected[0]), "nan included"
    assert all(map(torch.equal, found[1], expected[1]))


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_step_is_not_compiled_again_in_its_recording() -> None:
    """CUDA would end the recording. (The ids are part of a longer segment, so their rows are not neighbours.)"""
    expected, found = losses(replay.forward_backward), losses(replay.Replay(), compiled=True)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)


def test_a_recording_is_of_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's `graph` waits for the current device, which may be another one."""
    entered, inside = [], []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        entered.append(tensor)
        yield
        entered.pop()

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        inside.append(len(entered))
        yield

    for name, value in (("device_of", device_of), ("graph", graph), ("Stream", MagicMock()), ("stream", MagicMock())):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    _capture_graph(torch.neg, torch.zeros(1))
    with suppress(AttributeError, RuntimeError):  # nothing was recorded
        losses(replay.Replay())
    assert inside == [1, 1]


def test_a_shape_that_does_not_come_back_has_no_graph() -> None:
    run = replay.Replay()
    losses(run)
    assert [shape.graph is not None for shape in run.shapes.values()] == [False, False, True], "memories of 0, 5 and 6"


@pytest.mark.parametrize(
    ("shape", "device", "can"),
    [
        (SHAPE, "cpu", False),
        (replace(SHAPE, cutoffs=(5,)), "cuda", False),
        (TransformerXLConfig(vocab_size=13, kind="shaw", positions=8), "cuda", False),
        (SHAPE, "cuda", True),
    ],
)
def test_what_cannot_be_recorded_is_known(shape: TransformerXLConfig, device: str, can: bool) -> None:
    assert can_record(replace(CONFIG, device=device), shape) == can
