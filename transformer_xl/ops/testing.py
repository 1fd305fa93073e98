"""The contract that every backend of `relative_attention` must pass, on any device; it also tests a kernel of yours:

    from transformer_xl.ops import BACKENDS, testing

    BACKENDS["mine"] = attend       # from an `ops.call.Call` to the attended values
    for case in testing.CASES.values():
        testing.assert_contract("mine", case, torch.bfloat16, "cuda")

The reference is `ops/reference.py` in float64, on inputs rounded to the dtype under test. The tolerance follows from
the condition of the case, not from the error of another program: it comes from the same equations in float64, with each
intermediate result moved by a random rounding of that dtype (Monte Carlo arithmetic, Parker 1997). It does not depend
on the BLAS, the processor or the number of threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from . import relative_attention
from .masks import Mask
from .masks import visible as keys_seen

NAMES = ("q", "k", "v", "r", "content_bias", "position_bias")
Arguments = dict[str, Any]
"""Arguments of `relative_attention` by their names."""


@dataclass(frozen=True)
class Case:
    """Shapes and masks of one call. The default sizes are distinct primes, so that a swapped axis cannot pass."""

    queries: int = 7
    memory: int = 11
    attn_len: int | None = None
    valid: tuple[int, ...] | None = None
    batch: int = 3
    heads: int = 2
    head_size: int = 5
    scale: float | None = None
    spare: int = 0
    """Rows of `r` in excess of the number of keys."""
    strided: bool = False
    """Inputs are views of larger tensors, laid out as the model's projections leave them."""
    causal: bool = True
    look_ahead: int | None = None
    end: tuple[int, ...] | None = None
    begins: tuple[tuple[int, ...], ...] | None = None
    """For each row, the queries with which a document begins."""

    @property
    def later(self) -> int:
        """The farthest distance ahead that `r` has."""
        return 0 if self.causal else self.queries - 1


CASES = {
    "memory": Case(),
    "first token": Case(queries=1, memory=0),
    "one step": Case(queries=1),
    "no memory": Case(memory=0),
    "more queries than memory": Case(queries=11, memory=7),
    "strided views": Case(strided=True),
    "own scale": Case(scale=0.3),
    "a longer table": Case(spare=3),
    "a longer table in one step": Case(queries=1, spare=40),
    "window": Case(attn_len=5),
    "window of one": Case(attn_len=1),
    "window as long as the memory": Case(attn_len=11),
    "window that hides one key": Case(attn_len=17),
    "window that hides none": Case(attn_len=18),
    "window beyond the keys": Case(attn_len=29),
    "window without memory": Case(queries=11, memory=0, attn_len=3),
    "window in one step": Case(queries=1, attn_len=5),
    "short rows": Case(valid=(11, 4, 0)),
    "rows that start inside": Case(valid=(-3, 0, -6)),
    "a row of padding": Case(valid=(-7, 11, -1)),
    "padding without memory": Case(memory=0, valid=(0, -2, -7)),
    "one step, short rows": Case(queries=1, valid=(-1, 0, 3)),
    "window and short rows": Case(attn_len=5, valid=(2, -1, 11), strided=True),
    "beyond a block": Case(queries=67, memory=101, heads=2, head_size=37, batch=2, strided=True),
    "steep": Case(queries=37, memory=41, head_size=13, scale=3.0, valid=(41, 3, -2)),
    "beyond a block, all masks": Case(queries=131, memory=71, attn_len=59, valid=(71, 13, -83), head_size=17),
    "padding on the right": Case(end=(7, 3, 0), valid=(11, -2, 5)),
    "both directions": Case(causal=False, memory=0),
    "both directions after a memory": Case(causal=False),
    "both directions, one query": Case(causal=False, queries=1),
    "both directions, a longer table": Case(causal=False, spare=3, strided=True),
    "both directions, padding": Case(causal=False, memory=0, end=(7, 1, 4), valid=(0, 0, -3)),
    "both directions, a row of padding": Case(causal=False, end=(7, 0, 5), valid=(11, 4, 0)),
    "look-ahead": Case(causal=False, look_ahead=2),
    "look-ahead of none": Case(causal=False, look_ahead=0),
    "look-ahead beyond the keys": Case(causal=False, look_ahead=7),
    "look-ahead and window": Case(causal=False, look_ahead=2, attn_len=4, end=(7, 6, 2), valid=(11, -1, 3)),
    "both directions, window": Case(causal=False, attn_len=5, strided=True),
    "both directions, window without memory": Case(queries=11, memory=0, causal=False, attn_len=3),
    "both directions, beyond a block": Case(67, 37, causal=False, valid=(37, -43), end=(67, 53), batch=2, head_size=37),
    "documents": Case(begins=((0,), (3, 4), ())),
    "documents in each position": Case(begins=(tuple(range(7)), (6,), (1,)), strided=True),
    "documents and window": Case(begins=((2, 5), (0, 3), (6,)), attn_len=4, valid=(11, 2, 0)),
    "documents without memory": Case(memory=0, begins=((0, 3), (5,), (2,)), valid=(0, -4, 0)),
    "document in one step": Case(queries=1, begins=((0,), (), (0,))),
    "documents beyond a block": Case(131, 71, begins=((0, 67, 90), (5,), (127,)), valid=(71, 13, -3), head_size=17),
    "documents, both directions": Case(causal=False, begins=((0, 2, 5), (3,), ())),
    "documents, both directions, padding": Case(
        causal=False, begins=((2,), (5,), (1, 4)), end=(7, 6, 5), valid=(3, -1, 0)
    ),
    "documents, look-ahead": Case(causal=False, look_ahead=2, attn_len=4, begins=((2,), (5, 6), (1, 4))),
    "documents, both directions, beyond a block": Case(
        101, 37, causal=False, begins=((3, 64, 90), (50,)), valid=(37, -2), end=(101, 83), head_size=17, batch=2
    ),
    "look-ahead beyond a block": Case(101, 37, causal=False, look_ahead=19, attn_len=31, head_size=17, batch=2),
}


_DROPPED = Case(queries=19, memory=13, attn_len=29, valid=(13, -2), batch=2, head_size=32)
ON_A_CARD = {
    "a model's layer": Case(131, 257, batch=2, heads=2, head_size=64, strided=True),
    "window and padding": Case(131, 71, attn_len=59, valid=(71, 13, -83), heads=2, head_size=64),
    "both directions": Case(67, 37, causal=False, valid=(37, -43), end=(67, 53), batch=2, heads=2, head_size=64),
    "documents": Case(131, 71, begins=((0, 67, 90), (5,)), batch=2, heads=2, head_size=64),
    "heads of 41": Case(67, 101, batch=2, heads=2, head_size=41, strided=True),
    "heads of 128": Case(67, 101, batch=2, heads=2, head_size=128, strided=True),
}
"""What a card must pass before `auto` trains with the fused kernels there; the first case also in fp16. Compiling takes
most of the time."""


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Arguments:
    """Unit normal inputs of `relative_attention` that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    keys = case.memory + case.queries

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)

    def heads_first(rows: Tensor) -> Tensor:
        return rows.transpose(-2, -3) if case.strided else rows.transpose(-2, -3).contiguous()

    qkv = draw(case.batch, keys, 3, case.heads, case.head_size)
    inputs = dict(zip("qkv", map(heads_first, qkv.unbind(2)), strict=True))
    inputs["q"] = inputs["q"][:, :, case.memory :]
    inputs["r"] = heads_first(draw(keys + case.later + case.spare, case.heads, case.head_size))
    inputs["content_bias"], inputs["position_bias"] = draw(2, case.heads, case.head_size).unbind()
    return {name: value.detach().requires_grad_() for name, value in inputs.items()}


def masks(case: Case, device: str = "cpu") -> Arguments:
    """The keyword arguments of the call besides dropout and backend."""
    valid, end = (None if rows is None else torch.tensor(rows, device=device) for rows in (case.valid, case.end))
    found: Arguments = {"attn_len": case.attn_len, "valid": valid, "end": end, "scale": case.scale, "first": None}
    if case.begins is not None:
        found["first"] = torch.zeros(case.batch, case.queries, dtype=torch.long, device=device)
        for row, queries in enumerate(case.begins):
            for query in queries:
                found["first"][row, query:] = case.memory + query
    return found | {"causal": case.causal, "look_ahead": case.look_ahead}


def visible(case: Case, device: str = "cpu") -> Bool[Tensor, "B T S"]:
    """The keys that each query sees."""
    given, keys = masks(case, device), case.memory + case.queries
    ahead = case.later if case.look_ahead is None else case.look_ahead
    valid, end, first = given["valid"], given["end"], given["first"]
    mask = Mask.of(case.memory, case.attn_len, valid, ahead=ahead, end=end, first=first)
    seen = keys_seen(case.queries, keys, mask, device=device)
    return seen[:, 0].expand(case.batch, -1, -1)


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Inside the block, fill uninitialised memory with NaN, so an unwritten element shows in the result."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings(action="ignore"):
            assert torch.empty(3).isnan().all(), "this PyTorch does not fill torch.empty with NaN; poison it by hand"
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _run(
    inputs: Arguments, cotangent: Tensor, attend: Callable[[Arguments], Tensor], *, backward: bool = True
) -> dict[str, Tensor]:
    """The result and the six gradients; without `backward` the result alone, computed without a graph."""
    with torch.set_grad_enabled(backward):
        out = attend(inputs)
    if not backward:
        return {"out": out}
    gradients = torch.autograd.grad(out, [inputs[name] for name in NAMES], cotangent.to(out.dtype))
    return {"out": out.detach()} | {f"d {name}": grad for name, grad in zip(NAMES, gradients, strict=True)}


DRAWS = 8
ROUNDING = 0.4
"""Root mean square of a relative rounding error, in units of roundoff, for numbers in [1, 2)."""
FACTOR = 3
"""Maximum error of a backend as a multiple of the error of `with_roundings`. Independent errors add as the root of
their number, so 3 allows nine roundings where `with_roundings` makes one. Measured over all cases and dtypes with the
kernels of several processors and of an NVIDIA H200, the multiple is at most 1.9, and 2.2 for the reference, which sums
in the plainest order.
"""


@cache
def _truth(case: Case, dtype: torch.dtype, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Result and gradients in float64, and `DRAWS` samples of the rounding errors of each; all on the CPU."""
    inputs = {name: x.detach().double().requires_grad_() for name, x in make_inputs(case, dtype, seed=seed).items()}
    cotangent = _cotangent(case, dtype, seed).double()
    truth = _run(inputs, cotangent, lambda x: relative_attention(**x, **masks(case), backend="reference"))
    unit, unit_of_sums = (torch.finfo(kind).eps / 2 for kind in (dtype, torch.promote_types(dtype, torch.float32)))
    generator = torch.Generator().manual_seed(seed + 2)
    draws = [with_roundings(inputs, case, cotangent, ROUNDING * unit, unit_of_sums, generator) for _ in range(DRAWS)]
    return {name: (value, torch.stack([draw[name] for draw in draws]) - value) for name, value in truth.items()}


@torch.no_grad()
def with_roundings(
    inputs: Arguments, case: Case, cotangent: Tensor, unit: float, unit_of_sums: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """Result and gradients by the equations, with each intermediate number moved by a random rounding.

    A number x moves by `unit * |x|`, root mean square, and a sum also by `unit_of_sums` times the sum of its terms'
    sizes, because its partial sums are rounded. The backward pass computes its probabilities from scores that were
    rounded differently from their normaliser, because fused kernels compute scores twice, in two orders of summation.
    """

    def perturb(x: Tensor, terms: Tensor | float = 0.0) -> Tensor:
        by = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return x + (unit * x.abs() + unit_of_sums * terms) * by

    def product(equation: str, *factors: Tensor) -> Tensor:
        return perturb(torch.einsum(equation, *factors), torch.einsum(equation, *(x.abs() for x in factors)))

    q, k, v, r, content_bias, position_bias = (inputs[name] for name in NAMES)
    scale = q.shape[-1] ** -0.5 if case.scale is None else case.scale
    content_q, position_q = (perturb((q + bias[:, None]) * scale) for bias in (content_bias, position_bias))
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    row = (r.shape[1] - 1 - case.later - case.memory - i + j).clamp(max=r.shape[1] - 1).expand(*q.shape[:2], -1, -1)
    hidden = ~visible(case)[:, None]

    def score() -> Tensor:
        by_distance = product("bhtk,hrk->bhtr", position_q, r).gather(-1, row)
        both = perturb(product("bhtk,bhsk->bhts", content_q, k) + by_distance)
        return both.masked_fill(hidden, torch.finfo(both.dtype).min)

    first = score()
    out = product("bhts,bhsk->bhtk", perturb(first.softmax(-1)).masked_fill(hidden, 0), v)
    probability = perturb((score() - first.logsumexp(-1, keepdim=True)).exp()).masked_fill(hidden, 0)
    d_probability = product("bhtk,bhsk->bhts", cotangent, v)
    d_score = perturb(probability * perturb(d_probability - product("bhtk,bhtk->bht", cotangent, out)[..., None]))
    d_by_distance = torch.zeros(*q.shape[:3], r.shape[1], dtype=q.dtype).scatter_add(-1, row, d_score)
    d_content_q = product("bhts,bhsk->bhtk", d_score, k)
    d_position_q = product("bhtr,hrk->bhtk", d_by_distance, r)
    gradients = (
        perturb(scale * (d_content_q + d_position_q)),
        product("bhts,bhtk->bhsk", d_score, content_q),
        product("bhts,bhtk->bhsk", probability, cotangent),
        product("bhtr,bhtk->hrk", d_by_distance, position_q),
        scale * product("bhtk->hk", d_content_q),
        scale * product("bhtk->hk", d_position_q),
    )
    return {"out": out} | {f"d {name}": x for name, x in zip(NAMES, gradients, strict=True)}


def _cotangent(case: Case, dtype: torch.dtype, seed: int) -> Tensor:
    shape = case.batch, case.heads, case.queries, case.head_size
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)


def assert_contract(
    backend: str, case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0, *, backward: bool = True
) -> None:
    """Check that forward and all six gradients of `backend` are as close to float64 as rounding to `dtype` allows.

    Without `backward`, call it without a graph, as inference does.
    """
    inputs, cotangent = make_inputs(case, dtype, device, seed), _cotangent(case, dtype, seed).to(device)
    arguments = masks(case, device)
    with poisoned_empty():
        found = _run(
            inputs, cotangent, lambda x: relative_attention(**x, **arguments, backend=backend), backward=backward
        )
    expected = _truth(case, dtype, seed)
    measures = {
        "root mean square": lambda x: x.square().mean().sqrt().item(),
        "largest": lambda x: x.abs().max().item(),
    }
    for name, value in found.items():
        assert value.dtype == dtype, f"{name}: {value.dtype}, inputs are {dtype}"
        truth, roundings = expected[name]
        for kind, measure in measures.items():
            error, usual = measure(value.cpu().double() - truth), measure(roundings)
            assert error <= FACTOR * usual, f"{name}: {kind} error {error:.3g}, rounding makes {usual:.3g}"


def assert_dropout(
    backend: str, case: Case = _DROPPED, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> None:
    """Check that dropout repeats bit by bit with a seed, drops its share of keys, each independently, scales the rest,
    and has one mask for both passes. `case` has as many keys as a head has numbers."""
    inputs, share = make_inputs(case, dtype, device), 0.3
    # With the identity as values the output is the probability of each key, dropped or kept.
    identity = {"v": torch.eye(case.head_size, dtype=dtype, device=device).expand_as(inputs["v"])}

    def attend(x: Arguments, dropout_p: float = share, seed: int = 5) -> Tensor:
        torch.manual_seed(seed)
        return relative_attention(**x, **masks(case, device), dropout_p=dropout_p, backend=backend)

    kept, other, whole = (attend(inputs | identity, *choice).detach() for choice in ((share, 5), (share, 6), (0.0, 5)))
    seen = visible(case, device)[:, None].expand_as(kept)
    drop = torch.where(seen & (kept != 0), 1 / (1 - share), 0.0).to(dtype)
    torch.testing.assert_close(kept, whole * drop)
    dropped = (kept == 0) & seen
    assert_rate(dropped, seen, share, "keys")
    for axis, name in enumerate(("rows", "heads", "queries", "keys")):
        last = seen.shape[axis] - 1
        pairs, both = (x.narrow(axis, 1, last) & x.narrow(axis, 0, last) for x in (seen, dropped))
        assert_rate(both, pairs, share**2, f"neighbouring {name}")
    assert not torch.equal(kept, other), "two seeds give one mask"

    cotangent = torch.randn(inputs["q"].shape, generator=torch.Generator().manual_seed(7)).to(device)
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    identity["v"] = identity["v"].double()

    def drop_same(x: Arguments) -> Tensor:
        probability = relative_attention(**x | identity, **masks(case, device), backend="reference")
        return (probability * drop.double()) @ x["v"]

    expected = _run(exact, cotangent.double(), drop_same)
    found, again = (_run(inputs, cotangent, attend) for _ in range(2))
    tolerance = 1e-7 if dtype == torch.float64 else 1e-4  # of sums of a hundred products of unit size
    for name, truth in expected.items():
        assert torch.equal(found[name], again[name]), f"{name} does not repeat bit by bit"
        difference = float((found[name].double() - truth).abs().max())
        assert difference <= tolerance * max(1.0, float(truth.abs().max())), f"{name} differs by {difference:.2g}"


def assert_rate(chosen: Tensor, all_of: Tensor, rate: float, name: str) -> None:
    """Check the share that is chosen, to five standard deviations of as many independent draws."""
    count = int(all_of.sum())
    found = float(chosen.sum()) / count
    assert abs(found - rate) < 5 * (rate * (1 - rate) / count) ** 0.5, f"dropped {found:.3f} of {name}, not {rate:.3f}"


def fault_of(backend: str, device: str) -> str | None:
    """The first case of `ON_A_CARD` that a backend fails on a device, and how it fails; None if it passes all."""
    from . import fused_step, fused_sublayer  # triton is not installed everywhere

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
    cases = ON_A_CARD | {"dropout": _DROPPED}
    todo = [(name, dtype, assert_contract) for name in ON_A_CARD for dtype in ("bf16", "fp32")]
    todo += [(next(iter(ON_A_CARD)), "fp16", assert_contract), ("dropout", "fp32", assert_dropout)]
    checks = [(name, dtype, partial(check, backend, cases[name], dtypes[dtype])) for name, dtype, check in todo]
    for dtype in ("bf16", "fp16"):
        checks.append(("a token", dtype, partial(fused_step.assert_step, dtypes[dtype])))
        checks.append(("a sublayer", dtype, partial(fused_sublayer.assert_sublayer, dtypes[dtype])))
    for name, dtype, check in checks:
        try:
            check(device=device)
        except Exception as error:  # a compiler raises what it likes
            return f"{name}, {dtype}: {type(error).__name__}: {error}".splitlines()[0][:300]
    return None
