"""Every recipe and kind of model on a CUDA device that is not there: devices, dtypes and shapes, without a GPU.

Fake tensors have a device, a dtype and a shape, and no numbers. CUDA's autocast has other rules than a CPU's, for
instance `layer_norm` returns fp32, so a model that runs on a CPU may give the fused kernels tensors of two dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from amount import ALL
from small_models import VARIANTS, small_config
from torch import Tensor

from benchmarks import launches
from transformer_xl import ops
from transformer_xl.config.recipe import load_recipe, packaged_recipes
from transformer_xl.config.settings import Lengths, RunConfig, TrainConfig
from transformer_xl.model.baselines import build_model
from transformer_xl.model.step import VectorStep
from transformer_xl.ops.call import Call
from transformer_xl.train.objective import Counts, Objective

pytest.importorskip("triton", reason="needs pip install triton")
ROWS = 3


def recipes() -> Iterator[Any]:
    """All in `make test-all`; else the one with the most parts, and one with bands."""
    for name in packaged_recipes() if ALL else ("enwik8-12l-modern", "wikitext103-modern"):
        recipe = load_recipe(name)
        shape = replace(recipe.model, vocab_size=recipe.model.vocab_size or 256)
        yield pytest.param(replace(recipe, model=shape), id=name)


def variants() -> Iterator[Any]:
    kinds: dict[str, dict[str, Any]] = {
        "shaw": {"kind": "shaw", "positions": 64},
        "vaswani": {"kind": "vaswani"},
        "al-rfou": {"kind": "al-rfou", "positions": 64},
        "lstm": {"kind": "lstm"},
        "qrnn": {"kind": "qrnn"},
        "shared positions, word dropout": {"share_position_projection": True, "dropout_words": 0.1},
        "dropout of attention": {"dropatt": 0.1, "dropout": 0.1, "qk_norm": True},
        "locked dropout": {"dropout": 0.1, "locked_dropout": True, "qk_norm": True},
    }
    for name, changes in (VARIANTS | kinds).items():
        train = TrainConfig(tgt_len=24, mem_len=0 if changes.get("kind") in ("vaswani", "al-rfou") else 32)
        yield pytest.param(RunConfig(model=small_config(**changes), train=train), id=name)


@pytest.fixture
def kernel_dtypes(guard: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[torch.dtype, ...]]]:
    """The dtypes of the fused kernels' tensors, call by call."""
    from transformer_xl.ops import triton

    found: set[tuple[torch.dtype, ...]] = set()

    def attend(call: Call) -> Tensor:
        found.add(tuple(x.dtype for x in call[:4]))
        return triton.attend(call)

    monkeypatch.setitem(ops.BACKENDS, "triton", attend)
    monkeypatch.setattr("transformer_xl.model.kernels.doubt", lambda _: "not tried here")
    with launches.fake_cuda(), torch.backends.cudnn.flags(enabled=False):  # cuDNN would ask the driver
        yield found


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("config", [*recipes(), *variants()])
def test_on_a_card(config: RunConfig, kernel_dtypes: set[tuple[torch.dtype, ...]]) -> None:
    train = config.train
    shape = replace(config.model, n_layer=min(config.model.n_layer, 2))
    with launches.CUDA:
        model = build_model(shape, backend="triton")
    ids = torch.zeros(ROWS, train.tgt_len, dtype=torch.int64, device=launches.CUDA)
    one = torch.ones((), device=launches.CUDA)
    for enabled in (True, False):
        memory = model.empty_memory(ROWS, train.lengths)
        objective = Objective(model.train(), alpha=train.ar_alpha, beta=train.tar_beta)
        for _ in range(2):  # without a past, and with one
            with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
                counts = Counts(one, one)
                loss, _, memory = objective(ids, ids, memory, train.lengths, counts=counts, progress=0.1)
            assert loss.dtype == torch.float32 and loss.device == launches.CUDA
        launches.backward(loss, objective)
        assert {p.grad.device for p in model.parameters() if p.grad is not None} == {launches.CUDA}
    relative = shape.kind == "transformer-xl"
    lengths = Lengths(tgt_len=16, mem_len=train.mem_len and 32, clamp_len=20 if relative else None)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        reader = model.eval().for_inference("bf16")
        for backend in ("triton", "sdpa"):
            for module in reader.modules():
                if hasattr(module, "backend"):
                    module.backend = backend
            state = reader.empty_cache(ROWS, lengths)
            for _ in range(2):
                nll, state = reader(ids[:, :16], ids[:, :16], state, lengths)
            assert nll.dtype == torch.float32 and nll.device == launches.CUDA
        if relative:
            step = VectorStep(reader.backbone, reader.empty_cache(ROWS, lengths), lengths)
            for _ in range(2):
                assert step(reader.embedding(ids[:, :1])).device == launches.CUDA
    assert all(len(set(dtypes)) == 1 for dtypes in kernel_dtypes), "the kernels take tensors of one dtype"
    assert kernel_dtypes or not relative
