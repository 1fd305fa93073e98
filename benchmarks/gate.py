"""Results are compared before times: the op must pass its contract, and losses from the same weights must agree.

The reference is Hugging Face, or the textbook form in fp32. The root mean square of a contender's differences from it,
over all tokens, is at most a share of the mean loss. Weights are so large that attention decides the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from transformer_xl.ops.testing import CASES, Case, assert_contract
from transformer_xl.runtime.device import PRECISIONS

from .race import Prepared

TOLERANCES = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 1e-2, "fp16": 1e-2}
"""fp32 sums of 12 layers agree to about 1e-5; bf16, with 8 bits and some 100 products, to about 2e-3. tf32, whose
products have 11 bits as those of fp16, is for a peer that fails under autocast."""
_CASES = ("memory", "one step", "no memory", "strided views", "window and short rows", "beyond a block, all masks")
_CASES += ("both directions, padding", "look-ahead and window")
_LARGE = Case(queries=131, memory=257, batch=2, heads=2, head_size=64, strided=True)


def check_op(backends: Sequence[str], precisions: Sequence[str], device: str, *, backward: bool) -> None:
    """Check that all backends pass the contract.

    Raises:
        AssertionError: a backend fails, so nothing is timed.
    """
    for precision in precisions:
        for backend in backends:
            for case in (*(CASES[name] for name in _CASES), _LARGE):
                try:
                    assert_contract(backend, case, PRECISIONS[precision], device, backward=backward)
                except AssertionError as error:
                    raise AssertionError(
                        f"No speed is reported: attention by {backend} in {precision} is wrong ({error}; {case})."
                    ) from error


def check_same(prepared: Mapping[str, Prepared], reference: str, pieces: Sequence[int]) -> dict[str, float]:
    """Make all contenders read the same tokens, and return the difference of each as a share of the mean loss.

    Raises:
        AssertionError: a difference is too large, so nothing is timed.
    """
    expected = prepared[reference].call("nll", pieces=list(pieces))
    mean = sum(expected) / len(expected)
    found = {}
    for key, contender in prepared.items():
        nll = expected if key == reference else contender.call("nll", pieces=list(pieces))
        assert len(nll) == len(expected), f"{key} scored {len(nll)} tokens, {reference} {len(expected)}"
        square = sum((a - b) ** 2 for a, b in zip(nll, expected, strict=True)) / len(expected)
        found[key] = math.sqrt(square) / mean
        precision = key.rsplit(" ", 1)[1]
        if not found[key] <= TOLERANCES[precision]:
            raise AssertionError(
                f"No speed is reported: losses of {key} differ from losses of {reference} by {found[key]:.2g} of their "
                f"mean, more than {TOLERANCES[precision]:g}."
            )
    return found


def check_output(theirs: Prepared, ours: Prepared, precision: str) -> None:
    """Check that two contenders with the same weights compute the same.

    Raises:
        AssertionError: they do not, so nothing is timed.
    """
    expected, found = (torch.tensor(contender.call("output")) for contender in (theirs, ours))
    difference = float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    assert difference < TOLERANCES[precision], f"No speed is reported: the results differ by {difference:.2g}."
