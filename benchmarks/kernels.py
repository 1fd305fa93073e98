"""`python -m benchmarks kernels`: what the fused kernels use, compiled for real GPUs on any machine.

A limit that a binary passes is an error.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from transformer_xl.ops import fused_step, fused_sublayer
from transformer_xl.ops import triton as fused
from transformer_xl.ops.testing import NAMES

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
STACK = 64
"""Maximum bytes of stack a thread."""
_TENSOR = r"\b(?:HMMA|HGMMA|UTC\w*MMA)\b"


class Hopper:
    """What Triton asks the driver of a card."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_kernel(name: str, target: int, dtype: str, head_size: int, *, masked: bool, both: bool) -> Any:
    """A launch's kernel for a GPU, made without one. `masked`: with dropout and padding."""
    kernel = fused.KERNELS[name]
    options = fused.tile_of(name, DTYPES[dtype], head_size, target)
    padded = max(16, triton.next_power_of_2(head_size))
    constants: dict[str, Any] = {"PRECISION": "ieee", "DROPOUT": masked, "BOTH": both, "K": head_size}
    constants |= {"BLOCK_K": padded, "BLOCK": options.pop("BLOCK")} | ({} if masked else {"lows": None, "seed": None})
    constants |= {} if masked and both else {"highs": None}
    constants |= {"BRANCH": target in fused.BRANCHING} if name in ("forward", "keys") else {}
    pointers: dict[str, str] = dict.fromkeys((*NAMES, "out", "d_out", "d_scores", "d_q", "d_k", "d_v"), f"*{dtype}")
    kinds = pointers | dict.fromkeys(("factor", "keep_scale", "scale"), "fp32")
    kinds |= dict.fromkeys(("lows", "highs", "seed"), "*i32") | dict.fromkeys(
        ("lse", "delta", "d_bias", "d_r"), "*fp32"
    )
    strides = ("_b", "_h", "_t", "_s")
    return _compiled(kernel, target, constants, kinds, lambda arg: arg in pointers or arg.endswith(strides), options)


def compile_step_kernel(name: str, target: int, dtype: str, size: int) -> Any:
    """A kernel of a step or of a sublayer (`ops/fused_*.py`), for heads or vectors of this size."""
    kernel: Any = getattr(fused_step, name, None) or getattr(fused_sublayer, name)
    padded = max(16, triton.next_power_of_2(size))
    sizes = {"K": size, "BLOCK_K": padded, "D": size, "BLOCK_D": padded, "ROWS": max(1, fused_sublayer.TILE // padded)}
    sizes |= {"PART": fused_step.PART, "BLOCK": fused_step.BLOCK, "QK_NORM": True, "RELU": True}
    sizes |= {"TILES": fused_sublayer.TILES}
    halves = "qkv", "kv", "r", "content_bias", "position_bias", "y", "rounded", "d_rounded", "d_y", "out"
    exact = "gain", "found", "x", "y_bias", "weight", "bias", "total", "normed", "d_normed", "d_x", "parts"
    kinds = dict.fromkeys(halves, f"*{dtype}") | dict.fromkeys(exact, "*fp32")
    kinds |= {"slots": "*i64", "counts": "*i64", "factor": "fp32", "epsilon": "fp32"}
    kinds |= {"seed": "*i32", "keep_scale": "fp32"}
    kinds |= {"attend_part": {"out": "*fp32", "parts": "i32"}, "add_parts": {"parts": "i32"}}.get(name, {})
    kinds |= {"x": f"*{dtype}"} if name == "drop_relu" else {}
    constants = {arg: sizes[arg] for arg in kernel.arg_names if arg in sizes}
    return _compiled(kernel, target, constants, kinds, lambda arg: "*" in kinds.get(arg, ""), {})


def _compiled(
    kernel: Any,
    target: int,
    constants: dict[str, Any],
    kinds: dict[str, str],
    is_aligned: Callable[[str], bool],
    options: dict[str, int],
) -> Any:
    signature = {arg: "constexpr" if arg in constants else kinds.get(arg, "i32") for arg in kernel.arg_names}
    aligned = [n for n, arg in enumerate(kernel.arg_names) if is_aligned(arg) and arg not in constants]
    source = ASTSource(kernel, signature, constants, {(n,): [["tt.divisibility", 16]] for n in aligned})
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options={"enable_fp_fusion": True} | options)


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
    rows: dict[tuple[int, str, int], list[str]] = {}
    wrong = []
    for target, dtype, head_size, name in _cases(size):
        found = [
            usage(compile_kernel(name, target, dtype, head_size, masked=masked, both=both))
            for masked, both in (MASKS if size == "paper" else MASKS[:1])
        ]
        wrong += [
            f"sm_{target}, {dtype}, {head_size}, {name}: {each}" for use in found for each in faults(target, dtype, use)
        ]
        most = {key: max(use[key] for use in found) for key in ("registers", "stack", "shared", "loop")}
        tile = fused.tile_of(name, DTYPES[dtype], head_size, target)
        cell = f"{tile['BLOCK']}/{tile['num_warps']}: {most['registers']}, {most['stack']}, {most['shared'] / 1024:.0f}"
        cell = f"{cell}, {min(use['tensor'] for use in found)}, {most['loop']}"
        rows.setdefault((target, dtype, head_size), []).append(cell)
    step = step_kernels((80, 90) if size == "toy" else SHARED)
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
        fewest = usage(compile_kernel(name, target, "bf16", 64, masked=False, both=False))["fewest"]
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
    sizes = [("attend_part", 41), ("attend_part", 64), ("attend_part", 128)]
    sizes += [("add_parts", 128), ("add_norm", 512), ("add_norm", 4096)]
    sizes += [("add_norm_backward", 512), ("add_norm_backward", 2048), ("drop_relu", 2048), ("drop_relu", 8192)]
    return {
        f"sm_{target}, {name}, {size}": usage(compile_step_kernel(name, target, "bf16", size))
        for target, (name, size) in product(targets, sizes)
    }


def _cases(size: str | None) -> Iterator[tuple[int, str, int, str]]:
    """Target, dtype, head size and launch."""
    if size == "toy":
        yield from product((80, 90), ("bf16",), (64,), fused.KERNELS)
        return
    for head_size, dtype, target, name in product(HEADS, DTYPES, SHARED, fused.KERNELS):
        yield target, dtype, head_size, name
