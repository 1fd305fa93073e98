"""What a compiled training step starts on a GPU, counted on any machine.

PyTorch's compiler writes its code for a fake CUDA device. Nothing is built or run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._functorch import config as functorch
from torch._inductor import compile_fx, config, exc, graph, scheduler
from torch._inductor.runtime.hints import DeviceProperties
from torch.fx.node import map_arg
from triton.runtime import driver

from transformer_xl.config.recipe import load_recipe
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.train.compiled import compiled
from transformer_xl.train.half import rounded_weights
from transformer_xl.train.objective import Counts, Objective

from .kernels import Card
from .launches import CUDA, Launches, add_guard, fake_cuda, gradients

_HOPPER = {"multi_processor_count": 132, "regs_per_multiprocessor": 65_536, "max_threads_per_multi_processor": 2048}


def count_compiled(recipe: str, batch_size: int | None = None) -> list[dict[str, int]]:
    """The graphs of a recipe's training step with a full memory, in bf16 with the fused kernels: forward, backward.
    (N-grams are not compiled, so their kernels would be missing.)"""
    loaded = load_recipe(recipe)
    shape = replace(loaded.model, vocab_size=loaded.model.vocab_size or 256)
    rows, lengths, found = batch_size or loaded.train.batch_size, loaded.train.lengths, list[dict[str, int]]()

    def write(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        def keep(lowered: graph.GraphLowering) -> Any:
            found.append(_launches(module, lowered.codegen()[0].value))
            raise _Written

        with patch.object(graph.GraphLowering, "compile_to_module", keep):
            try:
                compile_fx.compile_fx_inner(module, inputs, **options)
            except exc.InductorError as error:
                if not isinstance(error.inner_exception, _Written):
                    raise
        return module.forward

    add_guard()
    with fake_cuda(), _hopper(), torch.autocast("cuda", torch.bfloat16):
        with CUDA:
            model = TransformerXL(shape, backend="triton").train()
            ids = torch.zeros(rows, lengths.tgt_len, dtype=torch.int64)
        memory = model.empty_memory(rows, lengths)
        while memory.length < lengths.mem_len:
            memory = model.predict(ids, ids, memory, lengths)[1]
        objective = Objective(model)
        objective.compile(backend=partial(compile_fx.compile_fx, inner_compile=write), dynamic=False)
        with compiled(usual=True), rounded_weights(objective):
            objective(ids, ids, memory, lengths, counts=Counts.of(ids >= 0, CUDA))
    return found


class _Written(Exception):
    """The compiler's code is written, so nothing is left to do."""


@contextmanager
def _hopper() -> Iterator[None]:
    """What the compiler asks about a device."""
    known: Any = DeviceProperties(type="cuda", index=0, cc=90, major=9, warp_size=32, **_HOPPER)
    asked = SimpleNamespace(major=9, minor=0, name="H100", total_memory=80 << 30, gcnArchName="", **_HOPPER)
    with ExitStack() as stack:
        for owner, name, value in (
            (compile_fx, "_check_triton_bf16_support", lambda _: None),
            (scheduler, "has_triton", lambda *_: True),
            (torch.cuda, "get_device_properties", lambda *_: asked),
            (DeviceProperties, "create", lambda _: known),
            (driver, "_active", Card(90)),
            (config, "joint_graph_constant_folding", False),  # it makes real tensors
            (functorch, "force_non_lazy_backward_lowering", True),
            (torch.autograd, "grad", gradients),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def _launches(module: fx.GraphModule, code: str) -> dict[str, int]:
    """The launches of a graph for which the compiler wrote this code."""
    counted = Launches()
    with counted:
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target.__name__.startswith("attend"):
                given = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
                node.target(*given[0], **given[1])
    calls = {
        "written by the compiler": r"\.run\(",
        "products": r"extern_kernels\.\w+\(",
        "others": r"\baten\.\w+\.\w+\(",
    }
    found = {name: len(re.findall(call, code)) for name, call in calls.items()}
    return found | {"of attention": counted.kernels.total()}
