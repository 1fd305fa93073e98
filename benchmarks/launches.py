"""`python -m benchmarks launches`: what a training step, and a token, start on a GPU, counted on any machine.

Fake tensors of a CUDA device have a dtype and a shape, and no numbers. One step is taken with them, and each operator
counts for the kernels that PyTorch starts for it. It is an estimate: of 1,244 kernels of a step of `enwik8-12l` on an
H100 it sees nine tenths, because cuBLAS splits some products in two kernels, and operators have more than they show.
Gradients of n-grams, which training on one GPU keeps sparse, are counted as dense ones.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from transformer_xl.config.recipe import load_recipe
from transformer_xl.data.loader import Segment
from transformer_xl.mistake import Mistake
from transformer_xl.model import adaptive, kernels, step
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.ops import fused_step, fused_sublayer, native
from transformer_xl.train.half import rounded_weights
from transformer_xl.train.optim import build_optimizers
from transformer_xl.train.step import train_step

CUDA = torch.device("cuda", 0)
GUARD = """
#include <c10/core/impl/FakeGuardImpl.h>
C10_REGISTER_GUARD_IMPL(KIND, c10::impl::FakeGuardImpl<c10::DeviceType::KIND>)
"""
"""What a build of PyTorch without a kind of device lacks: something that "switches" to such a device."""

_NONE = "_unsafe_view", "alias", "detach", "device", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty"
"""Operators without a kernel, besides views."""
_SEVERAL = {"native_layer_norm_backward": 2, "index_put_": 10, "sort": 4, "topk": 2, "baddbmm": 2, "slice_backward": 2}
"""Kernels of operators that have more than one."""
_TENSORS = 110, 64, 48, 36
"""Tensors of a kernel over many of them, if each has 1, 2, ... parts; at most 320 blocks of 65,536 elements."""


@cache
def add_guard(kind: str = "CUDA") -> None:
    """Let fake tensors be on a CUDA or MPS device in this process.

    Raises:
        Mistake: there is no C++ compiler.
    """
    if kind == "CUDA" and (torch.version.cuda or torch.version.hip):
        return
    compiler = native.compiler()
    if compiler is None:
        raise Mistake("launches needs a C++ compiler. Install g++ or clang++.")
    torch_home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as name:
        source, library = Path(name, "guard.cpp"), Path(name, "guard.so")
        source.write_text(GUARD.replace("KIND", kind))
        flags = "-std=c++20", "-shared", "-fPIC", "-w", f"-I{torch_home}/include"
        command = [compiler, *flags, source, "-o", library, f"-L{torch_home}/lib", "-lc10"]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library))


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Fake tensors of a CUDA device: no row begins with padding, and all words are of the adaptive softmax's head."""

    def rows(self: Any, band: Tensor) -> tuple[Tensor, ...]:
        sizes = torch.stack([(band == i).sum() for i in range(len(self.sizes))]).tolist()
        return band.argsort(stable=True).split([len(band), *[0] * (len(sizes) - 1)])

    with ExitStack() as stack:
        for owner, name, value in (
            (adaptive._Bands, "_rows", rows),
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (fused_sublayer, "launch", _count_launch),
            (fused_step, "launch", _count_launch),
            (torch.cuda, "is_bf16_supported", lambda *_: True),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (Tensor, "pin_memory", lambda self: self),
            (FakeTensor, "tolist", lambda self: [self[0].item()] * self.numel()),
            (_foreach_utils, "_foreach_supported_types", [Tensor, torch.nn.Parameter, FakeTensor]),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(patch.object(FakeTensor, "item", _item, create=True))
        stack.enter_context(patch.object(FakeTensor, "__bool__", lambda self: self.item() < 0, create=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _count_launch(kernel: Any, _grid: Any, _like: Any, *args: Any, **_constants: Any) -> None:
    """Count a kernel that no operator starts."""
    if isinstance(counted := _get_current_dispatch_mode(), Launches):
        counted._start(kernel.fn.__name__, args)


def _item(number: Tensor) -> int:
    """A made-up value, for which the host would wait."""
    if isinstance(counted := _get_current_dispatch_mode(), Launches):
        counted.waits += number.is_cuda
    return 1


class Launches(TorchDispatchMode):
    """Counts what is started while it is active: kernels, and copies from or to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes: int = 0
        """Of the tensors that kernels read and write."""
        self.recorded: int = 0
        """Kernels in CUDA graphs, which the host starts at once."""
        self.copies: int = 0
        self.waits: int = 0
        """Copies for which the host waits: to the host, and to the device unless they are `non_blocking`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        from transformer_xl.ops import triton

        name: str = func.overloadpacket.__name__
        own = {"attend": triton._attend, "attend_backward": triton._attend_backward}
        if name in own:  # its body, with the same tensors
            with self, patch.object(triton, "_launch", lambda kernel, _, *rest: self._start(kernel, tree_leaves(rest))):
                return own[name]._init_fn(*args, **(kwargs or {}))
        if name == "_local_scalar_dense":
            self.waits += args[0].is_cuda
            return 1
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors}
        if name in ("_to_copy", "copy_") and len(devices) == 2:
            self.copies += 1
            self.waits += out.is_cpu or True not in (*args[2:], (kwargs or {}).get("non_blocking"))
        elif "cuda" in devices and not func.is_view and name not in _NONE:
            over_many = name.startswith(("_foreach", "_fused"))
            self._start(name, tensors, _over_many(args) if over_many else _SEVERAL.get(name, 1))
        return out

    def _start(self, name: str, given: Sequence[object], count: int = 1) -> None:
        self.kernels[name] += count
        self.bytes += sum({id(x): x.nbytes for x in given if isinstance(x, Tensor)}.values())


def _over_many(args: Sequence[Any]) -> int:
    """The kernels of an operator over lists of tensors."""
    depth = sum(isinstance(each, list | tuple) and isinstance(each[0], Tensor) for each in args[:4] if each != [])
    blocks = sum(-(-x.numel() // 65_536) for x in args[0])
    return max(-(-len(args[0]) // _TENSORS[depth - 1]), -(-blocks // 320))


def backward(loss: Tensor, module: nn.Module) -> None:
    """`loss.backward()` for the weights of the module, without PyTorch's engine."""
    weights = list(module.parameters())
    for weight, gradient in zip(weights, gradients([loss], weights, [torch.ones_like(loss)]), strict=True):
        weight.grad = gradient


@torch.no_grad()
def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grad_outputs: Sequence[Any], **_: Any) -> Any:
    """`torch.autograd.grad` without PyTorch's engine, which needs a driver for a CUDA device."""
    received: dict[Any, dict[int, Any]] = defaultdict(dict)

    def add(edge: Any, gradient: Any) -> None:
        node, index = edge[:2]
        like, known = node._input_metadata[index], received[node]
        gradient = (gradient if gradient.shape == like.shape else gradient.sum_to_size(like.shape)).to(like.dtype)
        known[index] = known[index] + gradient if index in known else gradient

    starts = [(get_gradient_edge(x), given) for x, given in zip(outputs, grad_outputs, strict=True) if x.requires_grad]
    for edge, given in starts:
        add(edge, given)
    ends = [get_gradient_edge(x) for x in inputs]
    for node in _from_last([edge.node for edge, _ in starts], {edge.node for edge in ends}):
        if node not in received or hasattr(node, "variable"):
            continue
        given = received.pop(node)
        call = node if callable(node) else node.apply
        found = call(*(given.get(index) for index in range(len(node._input_metadata))))
        found = list(found) if isinstance(found, tuple) else [found]
        while len(found) > len(node.next_functions):
            found.remove(None)  # of arguments that are no tensors
        for edge, gradient in zip(node.next_functions, found, strict=True):
            if edge[0] is not None and gradient is not None:
                add(edge, gradient)
    return tuple(received[edge.node].get(edge.output_nr) for edge in ends)


def _from_last(starts: Sequence[Any], ends: set[Any]) -> list[Any]:
    """The functions of a graph down to its ends, each before those that its gradients go to."""
    order, seen, stack = [], set(ends), [(start, False) for start in starts]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack += [(node, True), *((later, False) for later, _ in node.next_functions if later is not None)]
    return order[::-1]


def count_step(recipe: str, batch_size: int | None = None) -> tuple[Launches, dict[str, int]]:
    """The launches of a recipe's training step with a full memory, in bf16 with the fused kernels; and part by part."""
    config = load_recipe(recipe)
    shape = replace(config.model, vocab_size=config.model.vocab_size or 256)
    rows = batch_size or config.train.batch_size
    train = replace(config.train, device="cuda:0", precision="bf16", batch_size=rows, batch_chunk=1)
    counted, marks = Launches(), list[int]()

    def run(objective: Any, precision: str, factor: Any, call: Any, counts: Any, progress: float) -> Any:
        with torch.autocast("cuda", torch.bfloat16), rounded_weights(objective):
            loss, nll, memory = objective(*call, counts=counts, progress=progress)
        marks.append(counted.kernels.total())
        backward(loss * factor, objective)
        marks.append(counted.kernels.total())
        return nll.detach(), memory

    add_guard()
    with fake_cuda():
        with CUDA:
            model = TransformerXL(shape, backend="triton").train()
        memory = model.empty_memory(rows, train.lengths)
        ids = torch.zeros(rows, train.tgt_len, dtype=torch.int64)
        segment = Segment(ids, ids, None)
        optimizers = build_optimizers(model, train)
        for _ in range(2 + -(-train.mem_len // train.tgt_len)):
            counted, marks = Launches(), []
            with counted:
                _, memory = train_step(model, optimizers, segment, memory, train, 3000, run=run)
    forward, backward_ = marks
    rest = counted.kernels.total() - backward_
    return counted, {"forward": forward, "backward": backward_ - forward, "clipping and optimizer": rest}


@torch.no_grad()
def count_token(recipe: str, rows: int = 1, **shape: Any) -> Launches:
    """The launches of one more token in bf16 after a full memory, with the kernels of a step where they can serve.

    Args:
        shape: settings of the model that differ from the recipe's.
    """
    config, counted = load_recipe(recipe), Launches()
    model = replace(config.model, vocab_size=config.model.vocab_size or 256, **shape)

    def record(run: Callable[[Tensor], Tensor], _: Tensor) -> Callable[[Tensor], Tensor]:
        def replay(x: Tensor) -> Tensor:  # it copies what a graph reads and returns
            x, before = x.clone(), counted.kernels.total()
            out = run(x)
            counted.recorded += counted.kernels.total() - before
            return out.clone()

        return replay

    add_guard()
    with fake_cuda(), ExitStack() as stack:
        for owner, name, value in (
            (kernels, "doubt", lambda _: None),
            (kernels, "known_modules", lambda backbone, _: backbone.config.gate == "none"),  # fake weights have no type
            (step, "_capture_graph", record),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        with CUDA:
            writer = TransformerXL(model).for_inference("bf16")
            ids = torch.zeros(rows, 1, dtype=torch.int64)
        reader = step.Step(writer, writer.empty_cache(rows, config.train.lengths), config.train.lengths)
        reader(ids)
        counted.kernels.clear()
        counted.bytes = counted.recorded = 0
        with counted:
            reader(ids)
    return counted


def bench_launches(recipe: str = "enwik8-12l", batch_size: int | None = None) -> None:
    """Print the counts of a training step, and of a token that the model writes."""
    from .compiled import count_compiled

    counted, parts = count_step(recipe, batch_size)
    read = f"that read and write {counted.bytes / 1e9:.1f} GB, {counted.copies} copies, waits: {counted.waits}"
    print(f"{recipe}, one step: {counted.kernels.total():,} kernels {read}")
    print(", ".join(f"{name} {count:,}" for name, count in parts.items()))
    print(", ".join(f"{name} {count}" for name, count in counted.kernels.most_common(20)))
    model = load_recipe(recipe).model
    if not (model.ngrams or model.cutoffs):  # which wait for the device: several graphs
        for name, found in zip(("forward", "backward"), count_compiled(recipe, batch_size), strict=True):
            read = ", ".join(f"{count} {kind}" for kind, count in found.items())
            print(f"compiled {name}: {sum(found.values())} kernels, {read}")
    token = count_token(recipe)
    read = f"{token.recorded:,} of them in graphs, that read and write {token.bytes / 1e6:.0f} MB, waits: {token.waits}"
    print(f"one token after a memory: {token.kernels.total():,} kernels, {read}")
    print(", ".join(f"{name} {count}" for name, count in token.kernels.most_common(20)))
