"""The first sitting: is the op right, and where does the time go? 270 seconds.

python3 -m experiments.gpu.first --out OUT
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.config.recipe import load_recipe
from transformer_xl.config.settings import Lengths
from transformer_xl.model.memory import Memory
from transformer_xl.model.step import Step
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.ops import relative_attention
from transformer_xl.train.optim import build_optimizers
from transformer_xl.train.parallel import replicate, shard

from .sitting import Sitting, contract, machine
from .training import Training, small

S = Sitting.from_command_line(270)
FUSED = "triton" if S.cuda else "chunked"
PAPER = (22, 8, 512, 512, 64)
"""Batch, heads, T, M and K of enwik8-12l."""
SHAPES = {"paper": PAPER, "K 41": (4, 10, 150, 150, 41), "K 38": (4, 10, 70, 70, 38), "K 128": (2, 8, 768, 768, 128)}
SHAPES |= {"evaluation": (4, 8, 80, 2100, 64), "odd": (3, 5, 131, 257, 64)}
if S.toy:
    PAPER = (2, 2, 16, 16, 16)
    SHAPES = {"paper": PAPER, "odd": (3, 1, 7, 11, 5)}


def inputs(batch: int, heads: int, queries: int, memory: int, size: int, *, grad: bool = True) -> dict[str, Tensor]:
    """Unit normal arguments of the op in bf16, laid out as a model's projections leave them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(S.device, torch.bfloat16)

    q, k, v = (x.transpose(1, 2) for x in draw(batch, memory + queries, 3, heads, size).unbind(2))
    found = {"q": q[:, :, memory:], "k": k, "v": v, "r": draw(memory + queries, heads, size).transpose(0, 1)}
    found |= {"content_bias": draw(heads, size), "position_bias": draw(heads, size)}
    return {name: x.detach().requires_grad_(grad) for name, x in found.items()}


def both(x: dict[str, Tensor], backend: str, cotangent: Tensor) -> list[Tensor]:
    """The result and the six gradients."""
    out = relative_attention(**x, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, list(x.values()), cotangent.to(out.dtype))]


S.part("machine", 5)(lambda: machine(S))


@S.part("rates", 10)
def _() -> dict[str, float]:
    """What the device can do: a copy, three products of bf16, and the time of a launch on the host."""
    found = {}
    x = torch.zeros(1 << (20 if S.toy else 30), dtype=torch.uint8, device=S.device)
    y = torch.empty_like(x)
    found["copy, TB/s"] = 2 * len(x) / S.milliseconds(lambda: y.copy_(x))["ms"] / 1e9
    for m, k, n in [(64, 64, 64)] if S.toy else [(8192, 8192, 8192), (11264, 512, 2048), (9000, 410, 2100)]:
        a, b = (torch.randn(shape, device=S.device, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
        milliseconds = S.milliseconds(lambda a=a, b=b: a @ b)["ms"]
        found[f"product {m} x {k} x {n}, TFLOP/s"] = 2 * m * k * n / milliseconds / 1e9
    one = torch.zeros(8, device=S.device)
    S.wait()
    begun = time.perf_counter()
    for _ in range(3000):
        one.add_(1)
    found["launch on the host, us"] = (time.perf_counter() - begun) / 3000 * 1e6
    return found


@S.part("the op at full size", 20)
def _() -> dict[str, Any]:
    """Relative errors of the result and the six gradients, against `strided` in fp32; and whether the bits repeat."""
    found = {}
    for name, shape in SHAPES.items():
        x = inputs(*shape)
        exact = {key: value.detach().float().requires_grad_() for key, value in x.items()}
        torch.manual_seed(1)
        cotangent = torch.randn_like(exact["q"])
        truth = both(exact, "strided", cotangent)
        runs = [both(x, backend, cotangent) for backend in (FUSED, FUSED, "strided")]
        errors = [[float((a.float() - b).norm() / b.norm()) for a, b in zip(run, truth, strict=True)] for run in runs]
        found[name] = {FUSED: errors[0], "strided": errors[2], "same bits": all(map(torch.equal, *runs[:2]))}
    return found


@S.part("the contract", 30)
def _() -> dict[str, Any]:
    """With an empty cache of kernels, as a user runs it the first time."""
    os.environ |= {"TRITON_CACHE_DIR": str(S.out / "triton"), "TXL_HOME": str(S.out / "home")}
    return contract(S)


@S.part("the tests of the kernels", 45)
def _() -> str:
    words = ["-q", "-n", "8" if S.cuda else "0", "-p", "no:cacheprovider", "-p", "no:benchmark", "-rf", "--tb=short"]
    chosen = "not interpreter and not real_gpus" if S.cuda else "refused"
    return S.run("-m", "pytest", *words, "tests/ops/test_triton.py", "-k", chosen, log="pytest.log", seconds=S.left)[
        -300:
    ]


def launches(call: Callable[[], Any]) -> dict[str, float]:
    """Median microseconds of each of the four launches."""
    from transformer_xl.ops import triton as fused

    launch, events = fused._launch, {}

    def timed(name: str, *arguments: Any) -> None:
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        launch(name, *arguments)
        pair[1].record()
        events.setdefault(name, []).append(pair)

    fused._launch = timed
    try:
        for _ in range(15):
            call()
        S.wait()
    finally:
        fused._launch = launch
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs[3:]) * 1e3 for name, pairs in events.items()}


@S.part("the time of the op", 30)
def _() -> dict[str, Any]:
    """Each launch; each backend; attention without the position term (the ceiling); sizes of evaluation."""
    batch, heads, queries, memory, size = PAPER
    useful = 6 * size * batch * heads * (queries * memory + queries * (queries + 1) / 2)
    x, still = inputs(*PAPER), inputs(*PAPER, grad=False)
    cotangent = torch.randn_like(x["q"])
    found: dict[str, Any] = {"launches, us": launches(lambda: both(x, "triton", cotangent))} if S.cuda else {}
    for backend in (FUSED, "strided", "sdpa"):
        with torch.no_grad():
            forward = S.milliseconds(lambda b=backend: relative_attention(**still, backend=b))
        found[backend] = {"forward": forward, "TFLOP/s": useful / forward["ms"] / 1e9}
        if backend != "sdpa" or S.cuda:
            found[backend]["both"] = S.milliseconds(lambda b=backend: both(x, b, cotangent))
    if S.cuda:
        from torch.nn.attention.bias import causal_lower_right

        q, k, v = (x[name].detach().contiguous().requires_grad_() for name in "qkv")
        mask: Any = causal_lower_right(queries, queries + memory)
        attend = F.scaled_dot_product_attention
        with torch.no_grad():
            forward = S.milliseconds(lambda: attend(q, k, v, mask))
        train = S.milliseconds(lambda: torch.autograd.grad(attend(q, k, v, mask), [q, k, v], cotangent))
        found["without the position term"] = {"forward": forward, "both": train}
    for shape in [] if S.toy else [(10, 8, 80, 2100, 64), (1, 8, 128, 3800, 64), (60, 10, 150, 150, 41)]:
        still = inputs(*shape, grad=False)
        with torch.no_grad():
            times = {b: S.milliseconds(partial(relative_attention, **still, backend=b), 0.1) for b in (FUSED, "sdpa")}
        found[f"forward {shape}"] = times
    return found


@S.part("memory for the scores' gradients", 10)
def _() -> dict[str, Any]:
    """Forward and backward with more or less of it, in MiB; 64 rows."""
    from transformer_xl.ops import triton as fused

    x, found, usual = inputs(64 if S.cuda else 2, *PAPER[1:]), {}, fused.SCORES
    cotangent = torch.randn_like(x["q"])
    for size in (2048, 1024, 512, 256, 128, 64, 32) if S.cuda else ():
        fused.SCORES = size << 20
        found[size] = S.milliseconds(lambda: both(x, FUSED, cotangent))["ms"]
    fused.SCORES = usual
    return found


@S.part("eight steps with two backends", 15)
def _() -> dict[str, list[float]]:
    found = {}
    for backend in (FUSED, "strided"):
        training = Training(S, "enwik8-12l-modern", 4, backend=backend, length=128)
        found[backend] = [training() for _ in range(8)]
    return found


for recipe, batch in [("enwik8-12l", 22), ("enwik8-12l", 64), ("enwik8-12l-modern", 64), ("enwik8-fast", 32)]:
    S.part(f"train {recipe}, batch {batch}", 15)(lambda r=recipe, b=batch: Training(S, r, b).times(profile=True))
S.part("train wikitext103-standard, batch 60", 25)(lambda: Training(S, "wikitext103-standard", 60).times(profile=True))


def decoding(model: TransformerXL, precision: str) -> dict[str, Any]:
    """Milliseconds of a token, and the largest difference of a probability from those with the paper's memory."""
    lengths, enabled = Lengths(tgt_len=1, mem_len=16 if S.toy else 512), precision == "bf16"
    with torch.no_grad(), torch.autocast(S.device.type, torch.bfloat16, enabled=enabled):
        reader = model.for_inference(precision)
        step = Step(reader, reader.empty_cache(2, lengths), lengths)
        memory, worst = reader.empty_memory(2, lengths), 0.0
        for token in torch.randint(200, (2, 100), device=S.device).split(1, 1):
            logs, memory = reader.log_probs(token, memory, lengths)
            worst = max(worst, float((step(token).exp() - logs[:, -1].exp()).abs().max()))
        token = torch.zeros(2, 1, dtype=torch.int64, device=S.device)
        return S.milliseconds(lambda: step(token)) | {"difference": worst}


@S.part("evaluation and decoding", 20)
def _() -> dict[str, Any]:
    shape = load_recipe("enwik8-12l").model
    torch.manual_seed(0)
    model = TransformerXL(small(shape) if S.toy else shape).to(S.device).eval()
    found: dict[str, Any] = {}
    with torch.no_grad(), torch.autocast(S.device.type, torch.bfloat16):
        reader = model.for_inference("bf16")
        for batch, queries, memory in [(2, 8, 32)] if S.toy else [(10, 80, 2100), (32, 512, 2100), (1, 128, 3800)]:
            ids = torch.randint(200, (batch, queries), device=S.device)
            lengths = Lengths(tgt_len=queries, mem_len=memory, attn_len=memory)
            shape = (batch, memory, model.config.d_model)
            past = Memory(tuple(torch.zeros(shape, device=S.device) for _ in model.backbone.layers))
            for backend in (FUSED, "sdpa"):
                for module in reader.modules():
                    if hasattr(module, "backend"):
                        module.backend = backend
                state = [reader.cached(past, lengths)]

                def read(ids: Tensor = ids, lengths: Lengths = lengths, state: list[Any] = state) -> None:
                    state[0] = reader(ids, ids, state[0], lengths)[1]

                found[f"{batch} x {queries} after {memory}, {backend}"] = S.milliseconds(read)
    for precision in ("fp32", "bf16"):
        found[f"decoding, {precision}"] = decoding(model, precision)
    return found


@S.part("NCCL with one rank", 10)
def _() -> dict[str, Any]:
    """Losses with DDP and FSDP2 beside none. A training of one rank starts no process group; here one is started."""
    rendezvous = f"tcp://127.0.0.1:{29511 if S.cuda else 29512}"
    torch.distributed.init_process_group("nccl" if S.cuda else "gloo", rendezvous, rank=0, world_size=1)
    found = {}
    for how in ("none", "ddp", "fsdp"):
        training = Training(S, "enwik8-12l", 4, length=128)
        if how == "ddp":
            training.objective = replicate(training.objective)
        if how == "fsdp":
            shard(training.model, 1)
            training.optimizers = build_optimizers(training.model, training.train)
        found[how] = [training() for _ in range(4)]
    torch.distributed.destroy_process_group()
    return found


def compiled_step(recipe: str, batch: int) -> dict[str, Any]:
    """With torch.compile, no dropout: the losses of four steps beside those without, and the times."""
    plain, compiled = (Training(S, recipe, batch, dropout=False) for _ in range(2))
    compiled.objective.compile()
    begun = time.perf_counter()
    losses = {"compiled": [compiled() for _ in range(4)], "plain": [plain() for _ in range(4)]}
    return losses | {"first steps, s": time.perf_counter() - begun} | compiled.times(profile=S.cuda)


for recipe, batch in [("enwik8-12l", 22), ("enwik8-12l", 64), ("enwik8-12l-modern", 64)]:
    S.part(f"compiled {recipe}, batch {batch}", 45)(lambda r=recipe, b=batch: compiled_step(r, b))


@S.part("replayed enwik8-12l-modern, batch 22", 20)
def _() -> dict[str, Any]:
    """Losses of eight steps with dropout, kernel by kernel and as a CUDA graph from the third on."""
    found: dict[str, Any] = {}
    for replay in (False, True):
        training = Training(S, "enwik8-12l-modern", 22, replay=replay and S.cuda)
        torch.manual_seed(1)
        found["replayed" if replay else "plain"] = [training() for _ in range(8)]
    return found | {"same bits": found["plain"] == found["replayed"]} | training.times(profile=False)


def replayed_step(recipe: str, batch: int, compiled: bool) -> dict[str, Any]:
    training = Training(S, recipe, batch, replay=S.cuda)
    if compiled:
        training.objective.compile()
    begun = time.perf_counter()
    return {"losses": [training() for _ in range(6)], "s": time.perf_counter() - begun} | training.times(profile=S.cuda)


for recipe, batch, compiled in [
    ("enwik8-12l", 22, False),
    ("enwik8-12l", 64, False),
    ("enwik8-12l", 22, True),
    ("enwik8-12l", 64, True),
    ("enwik8-12l-modern", 64, True),
]:
    name = f"replayed{', compiled' * compiled} {recipe}, batch {batch}"
    S.part(name, 45 if compiled else 15)(lambda r=recipe, b=batch, c=compiled: replayed_step(r, b, c))


FLEX = """
import json, sys
import torch
from benchmarks.flex import FlexOp
job = json.loads(sys.argv[1])
for backward in (False, True):
    try:
        op = FlexOp(job | {"backward": backward})
        times = []
        for _ in range(20):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record(); op.run(); events[1].record(); events[1].synchronize()
            times.append(events[0].elapsed_time(events[1]))
        print("both" if backward else "forward", sorted(times)[10], "ms")
    except Exception as error:
        print("both" if backward else "forward", type(error).__name__, str(error)[:300])
"""


@S.part("FlexAttention", 30)
def _() -> str:
    """The same op, in a process of its own: its compiler may fail, or not end."""
    if not S.cuda:
        return "for CUDA"
    names = "batch", "heads", "tgt_len", "mem_len", "head_size"
    job = dict(zip(names, PAPER, strict=True)) | {"device": str(S.device), "precision": "bf16"}
    return S.run("-c", FLEX, json.dumps(job), log="flex.log", seconds=min(S.left, 60))


S.finish()
