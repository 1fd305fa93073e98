"""`python -m benchmarks kernels`: the fused kernels, compiled for real GPUs on any machine, read from the binaries.

The first table has what each binary uses; a limit that is passed is an error. The second has the time that the
instructions of forward and backward need at least, and how it is estimated is in `docs/op.md`.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from transformer_xl.ops import triton as fused
from transformer_xl.ops.testing import NAMES

Target = int | str
SHARED: dict[Target, int] = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, "gfx942": 64}
"""Targets, and the KiB of shared memory that a program may have (CUDA C++ Programming Guide, "Technical Specifications
per Compute Capability"; for gfx942 the LDS of a compute unit)."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS = 64, 128, 32
MASKS = (True, True), (False, False), (True, False), (False, True)
"""Padding and dropout or none of them; both directions or causal."""
STACK = 64
"""Maximum bytes of stack a thread."""
_TENSOR = r"\b(?:HMMA|HGMMA|UTC\w*MMA)\b|\bv_s?mfma\w*"
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.x]*)\s*(.*?);", re.MULTILINE)


def compile_kernel(name: str, target: Target, dtype: str, head_size: int, *, masked: bool, both: bool) -> Any:
    """A launch's kernel for a GPU, made without one. `masked`: with dropout and padding."""
    kernel = fused.KERNELS[name]
    options = fused.tile_of(name, DTYPES[dtype], head_size, target)
    padded = max(16, triton.next_power_of_2(head_size))
    constants: dict[str, Any] = {"PRECISION": "ieee", "DROPOUT": masked, "BOTH": both, "K": head_size}
    constants |= {"BLOCK_K": padded, "BLOCK": options.pop("BLOCK")} | ({} if masked else {"start": None, "seed": None})
    constants |= {} if masked and both else {"end": None}
    pointers = dict.fromkeys((*NAMES, "out", "d_out", "d_scores", "d_q", "d_k", "d_v"), f"*{dtype}")
    kinds = (
        dict.fromkeys(("factor", "keep_scale", "scale"), "fp32")
        | {"start": "*i32", "end": "*i32", "seed": "*i32"}
        | pointers
    )
    kinds |= dict.fromkeys(("lse", "delta", "d_bias", "d_r"), "*fp32")
    signature = {arg: "constexpr" if arg in constants else kinds.get(arg, "i32") for arg in kernel.arg_names}
    strides = ("_b", "_h", "_t", "_s")
    aligned = [n for n, arg in enumerate(kernel.arg_names) if arg in pointers or arg.endswith(strides)]
    source = ASTSource(kernel, signature, constants, {(n,): [["tt.divisibility", 16]] for n in aligned})
    gpu = GPUTarget("hip", target, 64) if isinstance(target, str) else GPUTarget("cuda", target, 32)
    return triton.compile(source, target=gpu, options=options)


def usage(compiled: Any) -> dict[str, int]:
    """Registers and bytes of stack a thread, bytes of shared memory a program, and tensor-core instructions."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers, stack, spilled = (
            int(re.findall(rf"\.{key}:\s+(\d+)", text)[-1])
            for key in ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
        )
        stack = max(stack, 4 * spilled)
    else:
        text = sass(compiled)
        found = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump(compiled, "-res-usage"))
        assert found, "cuobjdump prints no REG and STACK"
        registers, stack = map(int, found.groups())
    tensor = len(re.findall(_TENSOR, text))
    return {"registers": registers, "stack": stack, "shared": compiled.metadata.shared, "tensor": tensor}


def faults(case: tuple[Any, ...], found: dict[str, int]) -> list[str]:
    """The limits that a binary passes, as sentences. A case: target, dtype, head size, launch and what follows."""
    target, dtype = case[:2]
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


def sass(compiled: Any) -> str:
    """The machine code of an NVIDIA binary."""
    return _cuobjdump(compiled, "-sass")


def bench_kernels(size: str | None = None, results: Path | None = None) -> None:
    """Compile everything and print the tables. `results` keeps what is done, so that another call goes on.

    Raises:
        AssertionError: a binary passes a limit.
    """
    lines = results.read_text(encoding="utf-8").splitlines() if results and results.exists() else []
    known = {row["version"]: row for row in map(json.loads, lines)}
    rows = []
    for case in _cases(size):
        target, dtype, head_size, name, masked, both = case
        tile = fused.tile_of(name, DTYPES[dtype], head_size, target)
        version = repr((case, tile, fused.KERNELS[name].cache_key, triton.__version__))
        row = known.get(version)
        if row is None:
            compiled = compile_kernel(name, target, dtype, head_size, masked=masked, both=both)
            row = {"version": version, "case": case, **usage(compiled)}
            if results:
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        rows.append(row)
    wrong = [f"{row['case']}: {fault}" for row in rows for fault in faults(row["case"], row)]
    _print_usage(rows)
    _print_stack(rows)
    _print_estimates()
    assert not wrong, "\n".join(wrong)


def _cases(size: str | None) -> Iterator[tuple[Any, ...]]:
    """Target, dtype, head size, launch, masked, both. Without `size` only with all masks; "paper": with each choice."""
    if size == "toy":
        yield from product((80, 90), ("bf16",), (64,), fused.KERNELS, (True,), (True,))
        return
    for masks in MASKS if size else MASKS[:1]:
        for head_size, dtype, target, name in product(HEADS, DTYPES, SHARED, fused.KERNELS):
            yield target, dtype, head_size, name, *masks


def _print_usage(rows: list[dict[str, Any]]) -> None:
    """The largest figures of all masks, one row a target, dtype and head size."""
    print("tile/warps: registers and bytes of stack a thread, KiB of shared memory, tensor-core instructions")
    print("| target | dtype | K | " + " | ".join(fused.KERNELS) + " |")
    print("|---|---|---:|" + "---|" * len(fused.KERNELS))
    groups: dict[Any, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        target, dtype, head_size, name = row["case"][:4]
        groups.setdefault((target, dtype, head_size), {}).setdefault(name, []).append(row)
    for (target, dtype, head_size), names in groups.items():
        cells = []
        for name, found in names.items():
            most = {key: max(row[key] for row in found) for key in ("registers", "stack", "shared")}
            least = min(row["tensor"] for row in found)
            tile = fused.tile_of(name, DTYPES[dtype], head_size, target)
            shape = f"{tile['BLOCK']}/{tile['num_warps']}"
            cells.append(f"{shape}: {most['registers']}, {most['stack']}, {most['shared'] / 1024:.0f}, {least}")
        print(f"| {_label(target)} | {dtype} | {head_size} | " + " | ".join(cells) + " |")


def _print_stack(rows: list[dict[str, Any]]) -> None:
    """For each head size, in ascending order: the largest stack, in bytes, of any choice of masks."""
    print("\nbytes of stack a thread, K = " + ", ".join(map(str, sorted({row["case"][2] for row in rows}))))
    print("| target | dtype | " + " | ".join(fused.KERNELS) + " |")
    print("|---|---|" + "---:|" * len(fused.KERNELS))
    most: dict[Any, dict[Any, int]] = {}
    for row in rows:
        target, dtype, head_size, name = row["case"][:4]
        cell = most.setdefault((target, dtype), {})
        cell[name, head_size] = max(cell.get((name, head_size), 0), row["stack"])
    for (target, dtype), cell in most.items():
        cells = (", ".join(str(cell[key]) for key in sorted(cell) if key[0] == name) for name in fused.KERNELS)
        print(f"| {_label(target)} | {dtype} | " + " | ".join(cells) + " |")
    print()


def _label(target: Target) -> str:
    return target if isinstance(target, str) else f"sm_{target}"


# --- the least time of a kernel's instructions ---

CARDS: dict[str, tuple[int, int, int]] = {
    "A100": (80, 1024, 64),
    "A40": (86, 512, 128),
    "L40S": (89, 512, 128),
    "H100": (90, 2048, 128),
}
"""Capability; multiply-adds of bf16 a cycle and multiprocessor on the tensor cores (peak TFLOP/s of the data sheet by
multiprocessors and clock); of fp32 (CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions")."""
_INTEGER = "ISETP FSEL SEL IADD3 LOP3 SHF FMNMX SGXT LEA PLOP3 F2FP FSETP PRMT IMNMX P2R R2P IABS VIADD VIADDMNMX"
_UNITS = dict.fromkeys(_INTEGER.split(), "integer") | {"MUFU": "exp", "SHFL": "shared", "IMAD": "multiply"}
_PER_CYCLE = {"integer": 64, "multiply": 64, "exp": 16, "shared": 32, "issue": 128}
"""Results a cycle and multiprocessor, by the same table: integers, comparisons and selections; integer multiply-adds;
exp2; words of shared memory, which shuffles use too; all instructions."""
L2_BYTES = 47
"""Bytes a cycle and multiprocessor from the second-level cache: 5,120 by 108 (A100's white paper)."""
_USEFUL = {"forward": 3, "keys": 5, "queries": 1, "distances": 1}
"""Useful products of BLOCK x BLOCK x K a tile. The strip is two tiles long. Forward computes a half once and keeps it
for the next tile, so all products are useful. Keys compute both halves and use half of each. Of the two loops of
queries one is counted. Queries and distances wait for memory, which this does not count."""


def instructions(text: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The instructions of the main loop, and those outside. It is the loop with the most tensor-core instructions."""
    found = [(int(m[1], 16), m[2], m[3]) for m in _LINE.finditer(text)]
    best: tuple[int, int] = (0, -1)
    most = -1
    for at, operation, arguments in found:
        to = re.search(r"0x([0-9a-f]+)", arguments)
        if operation.startswith("BRA") and to and int(to[1], 16) < at:
            count = sum(bool(re.match(_TENSOR, op)) for a, op, _ in found if int(to[1], 16) <= a <= at)
            if count > most:
                best, most = (int(to[1], 16), at), count
    inside = [(op, arguments) for a, op, arguments in found if best[0] <= a <= best[1]]
    outside = [(op, arguments) for a, op, arguments in found if not best[0] <= a <= best[1]]
    return inside, outside


def cycles(body: list[tuple[str, str]], warps: int, card: str) -> dict[str, float]:
    """The cycles that each unit of a multiprocessor needs for a program's instructions."""
    _, tensor, fp32 = CARDS[card]
    used: dict[str, float] = defaultdict(float)
    for operation, arguments in body:
        head, *rest = operation.split(".")
        used["issue"] += 32 / _PER_CYCLE["issue"]
        words = 4 if "128" in rest else 2 if "64" in rest else 1
        if head == "HMMA":  # 16816 is 16 x 8 x 16
            used["tensor"] += 16 * 8 * int(rest[0][3:]) / tensor
        elif head == "HGMMA":  # four warps execute one, and operands without registers are in shared memory
            rows, columns, depth = map(int, rest[0].split("x"))
            used["tensor"] += rows * columns * depth / tensor / 4
            stored = columns if arguments.split(",")[1].strip().startswith("R") else columns + rows
            used["shared"] += stored * depth * 2 / 128 / 4
        elif head in ("FFMA", "FMUL", "FADD", "HFMA2"):
            used["fp32"] += 32 / fp32
        elif head in _UNITS:
            used[_UNITS[head]] += 32 / _PER_CYCLE[_UNITS[head]]
        elif head in ("LDSM", "STSM", "LDS", "STS", "LDL", "STL", "LDGSTS"):
            matrices = int(rest[-1]) if rest and rest[-1].isdigit() else 1  # LDSM.16.M88.4, and STSM.16.MT88 for one
            used["shared"] += matrices if head in ("LDSM", "STSM") else words
        if head in ("LDG", "LDGSTS"):
            used["L2"] += words * 128 / L2_BYTES
    return {unit: count * warps for unit, count in used.items()}


def estimate(name: str, card: str, head_size: int = 64, length: int = 4096, masked: bool = False) -> dict[str, float]:
    """Cycles by unit for one block of rows, and the share of the tensor cores' peak that they allow: causal, bf16.

    Units work at the same time, so the busiest one sets the time. A causal block sees half of `length` on average, and
    half of one tile more; what is outside the loop counts once.
    """
    target = CARDS[card][0]
    tile = fused.tile_of(name, torch.bfloat16, head_size, target)
    text = sass(compile_kernel(name, target, "bf16", head_size, masked=masked, both=False))
    inside, outside = (cycles(body, tile["num_warps"], card) for body in instructions(text))
    tiles = (length / tile["BLOCK"] + 1) / 2
    used = {unit: inside.get(unit, 0) * tiles + outside.get(unit, 0) for unit in inside | outside}
    useful = _USEFUL[name] * length / 2 * tile["BLOCK"] * head_size / CARDS[card][1]
    return used | {"share": useful / max(used.values())}


def _print_estimates() -> None:
    units = ("tensor", "shared", "integer", "fp32", "exp", "issue", "L2")
    print("| card | launch | " + " | ".join(units) + " | share of the peak | with dropout and padding |")
    print("|---|---|" + "---:|" * (len(units) + 2))
    for card, name in product(CARDS, _USEFUL):
        found, masked = estimate(name, card), estimate(name, card, masked=True)
        largest = max(found[unit] for unit in units)
        shares = " | ".join(f"{found[unit] / largest:.0%}" for unit in units)
        print(f"| {card} | {name} | {shares} | {found['share']:.0%} | {masked['share']:.0%} |")
