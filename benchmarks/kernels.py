"""`python -m benchmarks kernels`: what the fused kernels use, compiled for real GPUs on any machine.

A limit that a binary passes is an error.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget

from transformer_xl.ops import fused_step, fused_sublayer
from transformer_xl.ops import triton as fused

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Compute capabilities, and the KiB of shared memory that a program may have (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability")."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS = 64, 128, 32, 48
"""Others are padded to a multiple of 16."""
MASKS = (True, True), (False, False), (True, False), (False, True)
"""Padding and dropout or none of them; both directions or causal."""
CARDS = {80: (108, 1.41), 90: (132, 1.755), 100: (148, 1.85)}
"""Multiprocessors and GHz of an A100, an H100 and a B200 (NVIDIA's data sheets)."""
ISSUED = 0.44
"""The share of instructions' slots that `forward` and `keys` used on an H100 (experiments/LOG.md, 2026-11-27)."""
STACK = 96
"""Maximum bytes of stack a thread."""
_TENSOR = r"\b(?:HMMA|HGMMA|UTC\w*MMA)\b"


class Card:
    """What Triton asks the driver of a card of this compute capability."""

    def __init__(self, target: int) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return self.target  # Triton keeps the binaries of each device apart

    def get_current_stream(self, device: int) -> int:
        return 0


class Pointer:
    """A tensor of a launch: its dtype, and an address for its alignment."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self.address = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self.address


@contextmanager
def compiling(target: int) -> Iterator[dict[str, Any]]:
    """Inside, a launch on tensors without memory compiles its kernel for a GPU and runs nothing. Yields the last binary
    of each kernel.

    Triton chooses a binary by dtypes, constants, and which addresses and numbers are multiples of 16.
    """
    found: dict[str, Any] = {}

    def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *args: Any, **constants: Any) -> None:
        given = [Pointer(each) if isinstance(each, Tensor) else each for each in args]
        found[kernel.__name__] = kernel.warmup(*given, grid=grid, enable_fp_fusion=True, **constants)

    with ExitStack() as stack:
        for owner in (fused_sublayer, fused_step):
            stack.enter_context(patch.object(owner, "launch", launch))
        stack.enter_context(patch.object(fused, "_target", lambda device: target))
        stack.enter_context(patch.object(triton.runtime.driver, "_active", Card(target)))
        yield found


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_op(
    batch: int,
    heads: int,
    queries: int,
    memory: int,
    size: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    joined: bool = True,
    masked: bool = False,
    both: bool = False,
) -> None:
    """Launch the kernels of a call of the op and of its gradients. `joined`: keys and values are laid out as a model
    joins them with its memory's. `masked`: with dropout and padding. `both`: in both directions."""
    keys = queries + memory
    q, k, v = (x.transpose(1, 2) for x in draw(batch, keys, 3, heads, size, dtype=dtype).unbind(2))
    if joined:
        q, k, v = (x.transpose(1, 2) for x in draw(batch, queries, 3, heads, size, dtype=dtype).unbind(2))
        past = draw(batch, memory, 2, heads, size, dtype=dtype).transpose(1, 3)
        k, v = torch.cat([past[:, :, 0], k], 2), torch.cat([past[:, :, 1], v], 2)
    r = draw(keys + both * (queries - 1), heads, size, dtype=dtype).transpose(0, 1)
    inputs = q[:, :, -queries:], k, v, r, draw(heads, size, dtype=dtype), draw(heads, size, dtype=dtype)
    bound, seed = draw(batch, queries, dtype=torch.int32), draw(1, dtype=torch.int32)
    bounds = bound if masked else None, bound if masked and both else None, seed if masked else None
    rest = *bounds, keys, size**-0.5, 0.1 * masked
    out, lse = fused._attend._init_fn(*inputs, *rest)
    fused._attend_backward._init_fn(out.transpose(1, 2), out, lse, *inputs, *rest)


@cache
def compile_op(target: int, dtype: torch.dtype, head_size: int, *, masked: bool, both: bool) -> dict[str, Any]:
    """The kernels of `fused.KERNELS` for a GPU, made without one, as enwik8-12l launches them."""
    with compiling(target) as found:
        launch_op(22, 8, 512, 512, head_size, dtype, masked=masked, both=both)
    return {name: found[kernel.__name__] for name, kernel in fused.KERNELS.items()}


def usage(compiled: Any) -> dict[str, int]:
    """Registers and bytes of stack a thread, bytes of shared memory a program, tensor-core instructions, all
    instructions of the loop over tiles, and the fewest that a tile takes, which no mask touches."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump(compiled, "-res-usage"))
    assert found, "cuobjdump prints no REG and STACK"
    sass = _cuobjdump(compiled, "-sass")
    tensor = len(re.findall(_TENSOR, sass))
    sizes = {"registers": int(found[1]), "stack": int(found[2]), "shared": compiled.metadata.shared, "tensor": tensor}
    loop, fewest = max(_loops(sass), default=(0, 0))
    return sizes | {"loop": loop, "fewest": fewest}


def _loops(sass: str) -> list[tuple[int, int]]:
    """The instructions of each loop that multiplies tiles, and those of the shortest way through it."""
    code = re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?);", sass)
    at = {int(address, 16): number for number, (address, _) in enumerate(code)}
    ends = ((number, re.search(r"BRA.* 0x([0-9a-f]+) *$", text)) for number, (_, text) in enumerate(code))
    jumps = {number: at[int(found[1], 16)] for number, found in ends if found and int(found[1], 16) in at}
    loops = [(first, last) for last, first in jumps.items() if first < last]
    own = [
        (first, last)
        for first, last in loops
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
    ]
    lines = [text for _, text in code]
    return [
        (last - first + 1, _fewest(lines, jumps, first, last))
        for first, last in own
        if re.search(_TENSOR, " ".join(lines[first:last]))
    ]


def _fewest(lines: list[str], jumps: dict[int, int], first: int, last: int) -> int:
    left = {last: 1}
    for number in range(last - 1, first - 1, -1):
        target, always = jumps.get(number, 0), lines[number].startswith("BRA 0x")
        ways = [left[target]] if number < target <= last else []
        left[number] = 1 + min(ways + [left[number + 1]] * (not (ways and always)))
    return left[first]


def predicted(name: str, target: int, tile: dict[str, int], fewest: int) -> float:
    """Microseconds of a launch in a layer of enwik8-12l, 22 rows of 512 tokens after 512, from its instructions."""
    rows, heads, queries, keys = 22, 8, 512, 1024
    block, (processors, gigahertz) = tile["BLOCK"], CARDS[target]
    tiles = rows * heads * sum(keys // block - late for late in range(queries // block))
    return tiles * tile["num_warps"] * fewest / (4e3 * processors * gigahertz * ISSUED)


def faults(target: int, dtype: str, found: dict[str, int]) -> list[str]:
    """The limits that a binary passes, as sentences."""
    limit = SHARED[target] * 1024
    wrong = []
    if found["stack"] > STACK:
        wrong.append(f"{found['stack']} bytes of stack, at most {STACK}")
    if found["shared"] > limit:
        wrong.append(f"{found['shared']:,} bytes of shared memory, at most {limit:,}")
    if dtype != "fp32" and not found["tensor"]:
        wrong.append("no tensor-core instructions")
    return wrong


def _cuobjdump(compiled: Any, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def bench_kernels(size: str | None) -> None:
    """Compile everything and print a table.

    Raises:
        AssertionError: a binary passes a limit.
    """
    toy = size == "toy"
    targets = (80, 90) if toy else tuple(SHARED)
    rows, wrong = dict[tuple[int, str, int], list[str]](), []
    for head_size, dtype, target in product((64,) if toy else HEADS, ("bf16",) if toy else DTYPES, targets):
        compiled = [
            compile_op(target, DTYPES[dtype], head_size, masked=masked, both=both)
            for masked, both in (MASKS if size == "paper" else MASKS[:1])
        ]
        for name in fused.KERNELS:
            found = [usage(each[name]) for each in compiled]
            heading = f"sm_{target}, {dtype}, {head_size}, {name}"
            wrong += [f"{heading}: {each}" for use in found for each in faults(target, dtype, use)]
            most = {key: max(use[key] for use in found) for key in ("registers", "stack", "shared", "loop")}
            tile = fused.tile_of(name, DTYPES[dtype], head_size, target)
            cell = f"{tile['BLOCK']}/{tile['num_warps']}: {most['registers']}, {most['stack']}, "
            cell += f"{most['shared'] / 1024:.0f}, {min(use['tensor'] for use in found)}, {most['loop']}"
            rows.setdefault((target, dtype, head_size), []).append(cell)
    step = step_kernels(targets)
    wrong += [f"{name}: {use['stack']} bytes of stack" for name, use in step.items() if use["stack"] > STACK]
    print("tile/warps: registers and bytes of stack a thread, KiB of shared memory, tensor-core instructions, and")
    print("instructions of the loop over tiles")
    print("| target | dtype | K | " + " | ".join(fused.KERNELS) + " |")
    print("|---|---|---:|" + "---|" * len(fused.KERNELS))
    for (target, dtype, head_size), cells in rows.items():
        print(f"| sm_{target} | {dtype} | {head_size} | " + " | ".join(cells) + " |")
    print(
        "\nenwik8-12l, 22 x 512 after 512, bf16: fewest instructions a tile, and microseconds a layer predicted by them"
    )
    for target, name in product(CARDS, ("forward", "keys")):  # the others wait for memory
        fewest = usage(compile_op(target, torch.bfloat16, 64, masked=False, both=False)[name])["fewest"]
        microseconds = predicted(name, target, fused.tile_of(name, torch.bfloat16, 64, target), fewest)
        print(f"sm_{target}, {name}: {fewest}, {microseconds:.0f}")
    print(
        "\nkernels of a step and of a sublayer, bf16: size, registers and bytes of stack a thread, KiB of shared memory"
    )
    for name, use in step.items():
        print(f"{name}: {use['registers']}, {use['stack']}, {use['shared'] / 1024:.1f}")
    assert not wrong, "\n".join(wrong)


def step_kernels(targets: Iterable[int]) -> dict[str, dict[str, int]]:
    """What the kernels of a step and of a sublayer use on these targets."""
    uses = {}
    for target in targets:
        with compiling(target) as found:
            for size, (launch, names) in _STEP.items():
                launch(size)
                uses |= {f"sm_{target}, {name}, {size}": usage(found[name]) for name in names}
    return uses


def _launch_step(size: int) -> None:
    """16 rows, 8 heads of this size, after a memory of 3,800."""
    state = draw(16, 2, 8, 3801, size), draw(16, dtype=torch.int64), draw(16, dtype=torch.int64)
    fused_step.attend_next(
        draw(16, 24 * size), *state, draw(8, 3801, size), draw(8, size), draw(8, size), draw(dtype=torch.float32)
    )


def _launch_sublayer(size: int) -> None:
    """Forward and backward of 64 rows, and dropout with the ReLU."""
    norm, seed = nn.LayerNorm(size, device="meta"), draw(1, dtype=torch.int32)
    x, y = draw(64, size, dtype=torch.float32).requires_grad_(), draw(64, size).requires_grad_()
    outputs: Any = fused_sublayer.dropout_norm(x, y, norm, norm.bias, 0.1, seed)
    torch.autograd.grad([each.sum() for each in outputs], x)
    fused_sublayer.dropped_relu(y, 0.1, seed)


_STEP = {
    **dict.fromkeys((41, 64, 128), (_launch_step, ("attend_part", "add_parts"))),
    **dict.fromkeys((512, 2048), (_launch_sublayer, ("add_norm", "add_norm_backward", "drop_relu"))),
}
"""What launches kernels for heads or vectors of a size, and the kernels."""
