"""Every recipe and kind of model on a CUDA device that is not there: devices, dtypes and shapes, without a GPU.

Fake tensors have a device, a dtype and a shape, and no numbers. CUDA's autocast has other rules than a CPU's, for
instance `layer_norm` returns fp32, so a model that runs on a CPU may give the fused kernels tensors of two dtypes.
Backward needs a driver even with fake tensors; the kernels get the same tensors in both passes.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import ALL
from small_models import VARIANTS, small_config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from transformer_xl import ops
from transformer_xl.config.recipe import load_recipe, packaged_recipes
from transformer_xl.config.settings import Lengths, RunConfig, TrainConfig, TransformerXLConfig
from transformer_xl.model import adaptive
from transformer_xl.model.baselines import build_model
from transformer_xl.model.step import VectorStep
from transformer_xl.ops import native
from transformer_xl.ops.call import Call
from transformer_xl.train.objective import Counts, Objective

pytest.importorskip("triton", reason="needs pip install triton")
CUDA = torch.device("cuda", 0)
RECURRENT = "lstm", "qrnn"
ROWS = 3


def recipes() -> Iterator[Any]:
    """Of recipes that differ only in numbers, the first."""
    kinds: set[tuple[object, ...]] = set()
    for name in packaged_recipes():
        recipe = load_recipe(name)
        values = [value for value in vars(recipe.model).values() if type(value) not in (int, float)]
        kind = tuple(value if isinstance(value, str) else bool(value) for value in values)
        if kind in kinds and not ALL:
            continue
        kinds.add(kind)
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
        sizes = {"vocab_size": 23, "n_layer": 2, "d_model": 14, "d_inner": 11}
        shape = TransformerXLConfig(**sizes, **changes) if name in RECURRENT else small_config(**changes)
        yield pytest.param(RunConfig(model=shape, train=train), id=name)


GUARD = """
#include <c10/core/impl/FakeGuardImpl.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>)
"""
"""What a build of PyTorch without CUDA lacks: something that "switches" to a CUDA device."""


@pytest.fixture(scope="module", autouse=True)
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    if torch.version.cuda or torch.version.hip:
        return
    compiler = next(filter(None, map(shutil.which, native.COMPILERS)), None)
    if compiler is None:
        pytest.skip("no C++ compiler for the device guard")
    home, torch_home = tmp_path_factory.mktemp("guard"), Path(torch.__file__).parent
    source, library = home / "guard.cpp", home / "guard.so"
    source.write_text(GUARD)
    flags = "-std=c++20", "-shared", "-fPIC", "-w", f"-I{torch_home}/include", f"-L{torch_home}/lib", "-lc10"
    subprocess.run([compiler, source, *flags[:4], "-o", library, *flags[4:]], check=True)
    ctypes.CDLL(str(library))


@pytest.fixture
def kernel_dtypes(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[torch.dtype, ...]]]:
    """The dtypes of the fused kernels' tensors, call by call. The sizes of bands, which depend on ids, are made up."""
    from transformer_xl.ops import triton

    found: set[tuple[torch.dtype, ...]] = set()

    def attend(call: Call) -> Tensor:
        found.add(tuple(x.dtype for x in call[:6]))
        return triton.attend(call)

    def rows(self: Any, band: Tensor) -> tuple[Tensor, ...]:
        return band.argsort(stable=True).split([len(band), *[0] * (len(self.sizes) - 1)])

    monkeypatch.setitem(ops.BACKENDS, "triton", attend)
    monkeypatch.setattr(adaptive._Bands, "_rows", rows)
    monkeypatch.setattr(FakeTensor, "__bool__", lambda _: False, raising=False)  # no row begins with padding
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    yield found


@pytest.mark.filterwarnings(
    "ignore:PyTorch was compiled without cuDNN", "ignore:Accessing the data pointer of FakeTensor"
)
@pytest.mark.parametrize("config", [*recipes(), *variants()])
def test_on_a_card(config: RunConfig, kernel_dtypes: set[tuple[torch.dtype, ...]]) -> None:
    train = config.train
    shape = replace(config.model, n_layer=min(config.model.n_layer, 2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with CUDA:
            model = build_model(shape, backend="triton")
        ids = torch.zeros(ROWS, train.tgt_len, dtype=torch.int64, device=CUDA)
        one = torch.ones((), device=CUDA)
        for enabled in (True, False):
            memory = model.empty_memory(ROWS, train.lengths)
            objective = Objective(model.train(), alpha=train.ar_alpha, beta=train.tar_beta)
            for _ in range(2):  # without a past, and with one
                with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
                    counts = Counts(one, one)
                    loss, _, memory = objective(ids, ids, memory, train.lengths, counts=counts, progress=0.1)
                assert loss.dtype == torch.float32 and loss.device == CUDA
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
                assert nll.dtype == torch.float32 and nll.device == CUDA
            if relative:
                step = VectorStep(reader.backbone, reader.empty_cache(ROWS, lengths), lengths)
                for _ in range(2):
                    assert step(reader.embedding(ids[:, :1])).device == CUDA
    assert all(len(set(dtypes)) == 1 for dtypes in kernel_dtypes), "the kernels take tensors of one dtype"
