"""The first sitting: is the op right, and where does the time go? 270 seconds.

python3 -m experiments.gpu.first --out OUT
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.config.recipe import load_recipe
from transformer_xl.config.settings import Lengths
from transformer_xl.model import step as steps
from transformer_xl.model.memory import Memory
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
    words += ["tests/ops/test_triton.py", "-k", chosen]
    return S.run("-m", "pytest", *words, log="pytest.log", seconds=S.left)[-300:]


@S.part("the time of the op", 30)
def _() -> dict[str, Any]:
    """Each backend; the launches; attention without the position term (the ceiling); sizes of evaluation."""
    batch, heads, queries, memory, size = PAPER
    useful = 6 * size * batch * heads * (queries * memory + queries * (queries + 1) / 2)
    x, still = inputs(*PAPER), inputs(*PAPER, grad=False)
    cotangent = torch.randn_like(x["q"])
    found: dict[str, Any] = {"launches": S.profile(lambda: both(x, FUSED, cotangent))}
    for backend in (FUSED, "strided", "sdpa"):
        with torch.no_grad():
            forward = S.milliseconds(lambda b=backend: relative_attention(**still, backend=b))
        found[backend] = {"forward, ms": forward, "TFLOP/s": useful / forward / 1e9}
        if backend != "sdpa" or S.cuda:
            found[backend]["both, ms"] = S.milliseconds(lambda b=backend: both(x, b, cotangent))
    if S.cuda:
        from torch.nn.attention.bias import causal_lower_right

        q, k, v = (x[name].detach().contiguous().requires_grad_() for name in "qkv")
        mask: Any = causal_lower_right(queries, queries + memory)
        attend = F.scaled_dot_product_attention
        with torch.no_grad():
            forward = S.milliseconds(lambda: attend(q, k, v, mask))
        train = S.milliseconds(lambda: torch.autograd.grad(attend(q, k, v, mask), [q, k, v], cotangent))
        found["without the position term"] = {"forward, ms": forward, "both, ms": train}
    for shape in [] if S.toy else [(10, 8, 80, 2100, 64), (1, 8, 128, 3800, 64), (60, 10, 150, 150, 41)]:
        still = inputs(*shape, grad=False)
        with torch.no_grad():
            times = {b: S.milliseconds(partial(relative_attention, **still, backend=b), 0.1) for b in (FUSED, "sdpa")}
        found[f"forward {shape}, ms"] = times
    return found


for recipe, batch in [("enwik8-12l", 22), ("enwik8-12l", 64), ("enwik8-12l-modern", 64), ("enwik8-fast", 32)]:
    S.part(f"train {recipe}, batch {batch}", 15)(lambda r=recipe, b=batch: Training(S, r, b).times(profile=True))
S.part("train wikitext103-standard, batch 60", 25)(lambda: Training(S, "wikitext103-standard", 60).times(profile=True))


def small_or_whole(recipe: str) -> TransformerXL:
    shape = load_recipe(recipe).model
    torch.manual_seed(0)
    return TransformerXL(small(shape) if S.toy else shape).to(S.device).eval()


@S.part("evaluation", 20)
def _() -> dict[str, Any]:
    model, found = small_or_whole("enwik8-12l"), dict[str, Any]()
    with torch.no_grad(), torch.autocast(S.device.type, torch.bfloat16):
        reader = model.for_inference("bf16")
        for batch, queries, memory in [(2, 8, 32)] if S.toy else [(10, 80, 2100), (32, 512, 2100), (1, 128, 3800)]:
            ids = torch.randint(200, (batch, queries), device=S.device)
            lengths = Lengths(tgt_len=queries, mem_len=memory, attn_len=memory)
            shape = (batch, memory, model.config.d_model)
            past = Memory(tuple(torch.zeros(shape, device=S.device) for _ in model.backbone.layers))
            state = [reader.cached(past, lengths)]

            def read(ids: Tensor = ids, lengths: Lengths = lengths, state: list[Any] = state) -> None:
                state[0] = reader(ids, ids, state[0], lengths)[1]

            found[f"{batch} x {queries} after {memory}, ms"] = S.milliseconds(read)
    return found


@torch.no_grad()
def decode(model: TransformerXL, precision: str, lengths: Lengths, can_fuse: Any) -> dict[str, Any]:
    half = torch.autocast(S.device.type, torch.bfloat16, enabled=precision == "bf16")
    said = list[bool]()
    with half, patch.object(steps, "can_fuse", lambda *call: said.append(can_fuse(*call)) or said[-1]):
        reader = model.for_inference(precision)
        step = steps.Step(reader, reader.empty_cache(1, lengths), lengths)
        memory, worst = reader.empty_memory(1, lengths), 0.0
        for token in torch.randint(200, (1, 100), device=S.device).split(1, 1):
            logs, memory = reader.log_probs(token, memory, lengths)
            worst = max(worst, float((step(token).exp() - logs[:, -1].exp()).abs().max()))
        token = torch.zeros(1, 1, dtype=torch.int64, device=S.device)
        return {"ms": S.milliseconds(partial(step, token)), "difference": worst, "kernels of a step": any(said)}


@S.part("decoding", 20)
def _() -> dict[str, Any]:
    """With PyTorch's operators and with the kernels of a step: the time of a token, and the largest difference of a
    probability from those with the paper's memory."""
    found: dict[str, Any] = {}
    for recipe, precision, mem_len in (
        ("enwik8-12l", "fp32", 512),
        ("enwik8-12l", "bf16", 512),
        ("enwik8-12l", "bf16", 3800),
        ("enwik8-12l-modern", "bf16", 512),
    ):
        model, lengths = small_or_whole(recipe), Lengths(tgt_len=1, mem_len=16 if S.toy else mem_len)
        for kernels in (False, True):
            found[f"{recipe}, {precision}, {mem_len}, {'kernels' if kernels else 'PyTorch'}"] = decode(
                model, precision, lengths, steps.can_fuse if kernels else lambda *_: False
            )
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
            training.optimizers = build_optimizers(training.model, training.config)
        found[how] = [training() for _ in range(4)]
    torch.distributed.destroy_process_group()
    return found


def variant(recipe: str, batch: int, *, compiled: bool = False, replay: bool = False) -> dict[str, Any]:
    """With torch.compile or as a CUDA graph from the fourth step on: the losses of eight steps, and the times."""
    settings = {"compile": compiled, "cuda_graph": replay and S.cuda}
    training = Training(S, recipe, batch, dropout=not compiled, **settings)
    torch.manual_seed(1)
    begun = time.perf_counter()
    found = {"losses": [training() for _ in range(8)], "first steps, s": time.perf_counter() - begun}
    return found | training.times(profile=S.cuda)


@S.part("replayed enwik8-12l-modern, batch 22", 20)
def _() -> dict[str, Any]:
    """Kernel by kernel and as a CUDA graph, with dropout: the losses have the same bits."""
    plain, replayed = (variant("enwik8-12l-modern", 22, replay=replay) for replay in (False, True))
    return {"same bits": plain["losses"] == replayed["losses"], "plain": plain, "replayed": replayed}


for recipe, batch, compiled, replay in [
    ("enwik8-12l", 22, True, False),
    ("enwik8-12l", 64, True, False),
    ("enwik8-12l-modern", 64, True, False),
    ("enwik8-12l", 22, False, True),
    ("enwik8-12l", 64, False, True),
    ("enwik8-12l", 64, True, True),
    ("enwik8-12l-modern", 64, True, True),
]:
    name = " ".join(["compiled"] * compiled + ["replayed"] * replay + [f"{recipe}, batch {batch}"])
    S.part(name, 45 if compiled else 15)(partial(variant, recipe, batch, compiled=compiled, replay=replay))


S.finish()
