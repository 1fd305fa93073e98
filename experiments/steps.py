"""Measure a training step of each model of the paper at its real size and batch 1 on a CPU: seconds and memory.

    python -m experiments.steps [RECIPE ...] [--precision bf16] [--recompute] [--meta]

Each recipe has its own process. A step is forward and backward over a segment of random ids after a full memory, with
the recipe's dropout. The peak is of the whole process; its bound, weights and gradients, is 8 bytes per parameter.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from unittest.mock import patch

from benchmarks.peak import peak_memory
from transformer_xl.config.recipe import load_recipe, packaged_recipes
from transformer_xl.train.objective import Objective

COLUMNS = "parameters       T     M   first s  second s   peak GB  bound GB"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The cost of two steps of a recipe."""

    recipe: str
    parameters: int
    tgt_len: int
    mem_len: int
    seconds: tuple[float, float]
    peak_bytes: int
    loss: float | None
    """Nats; None on the meta device."""

    def __str__(self) -> str:
        first, second = self.seconds
        sizes = f"{self.parameters:>13,} {self.tgt_len:>5} {self.mem_len:>5}"
        return f"{sizes} {first:>9.2f} {second:>9.2f} {self.peak_bytes / 1e9:>9.2f} {8 * self.parameters / 1e9:>9.2f}"


def measure(recipe: str, precision: str, meta: bool, recompute: bool) -> Steps:
    """Build the recipe's model and take two steps. Call this in a new process, because it reports the peak."""
    import torch

    from transformer_xl.model.memory import Memory
    from transformer_xl.model.transformer_xl import TransformerXL
    from transformer_xl.runtime.device import autocast, prepare_process

    prepare_process()
    config = load_recipe(recipe)
    shape, lengths = replace(config.model, vocab_size=config.model.vocab_size or 256), config.train.lengths
    torch.manual_seed(config.train.seed)
    device, seconds, loss = torch.device("meta" if meta else "cpu"), [], torch.zeros(())
    with device:
        model = TransformerXL(shape, backend=config.train.backend, recompute=recompute).train()
        memory = Memory.zeros(shape.n_layer, 1, lengths.mem_len, shape.d_model)
    for _ in range(2):
        text = torch.randint(shape.vocab_size, (1, lengths.tgt_len + 1), device=device)
        model.zero_grad()
        start = time.perf_counter()
        with _first_band_only() if meta else autocast(precision, device):
            loss, _, memory = Objective(model)(text[:, :-1], text[:, 1:], memory, lengths)
        loss.backward()
        seconds.append(time.perf_counter() - start)
    assert memory.length == lengths.mem_len, "the memory stays full"
    assert all(parameter.grad is not None for parameter in model.parameters()), "every weight takes part"
    return Steps(
        recipe=recipe,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tgt_len=lengths.tgt_len,
        mem_len=lengths.mem_len,
        seconds=(seconds[0], seconds[1]),
        peak_bytes=peak_memory(),
        loss=None if meta else loss.item(),
    )


def _first_band_only():
    """Put all words into the first band, because meta tensors have no values from which to find the band."""

    def rows(bands, band):
        return band.argsort().split([len(band)] + [0] * (len(bands.sizes) - 1))

    return patch("transformer_xl.model.adaptive._Bands._rows", rows)


def alone(recipe: str, precision: str, meta: bool, recompute: bool) -> Steps | str:
    """Run `measure` in its own process. If that fails, usually for lack of memory, return the reason."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(measure, recipe, precision, meta, recompute).result()
        except RuntimeError as error:
            return f"  {type(error).__name__}: {str(error).splitlines()[0]}"


def main() -> int:
    papers = [name for name, file in packaged_recipes().items() if " · published: " in file.read_text().splitlines()[0]]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", default=papers, help="by default the paper's")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--recompute", action="store_true", help="compute each layer again in backward")
    parser.add_argument("--meta", action="store_true", help="shapes only: no values, no memory, no precision")
    options = parser.parse_args()
    for recipe in options.recipes:
        try:
            load_recipe(recipe)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    width = max(map(len, options.recipes))
    print(f"{'recipe'.ljust(width)}    {COLUMNS}")
    results = []
    for recipe in options.recipes:
        results.append(alone(recipe, options.precision, options.meta, options.recompute))
        print(recipe.ljust(width), results[-1], flush=True)
    device = "meta" if options.meta else "cpu"
    facts = {"precision": options.precision, "recompute": options.recompute, "device": device}
    ended = [asdict(steps) for steps in results if isinstance(steps, Steps)]
    print(json.dumps(facts | {"steps": ended}))
    return int(len(ended) < len(results))


if __name__ == "__main__":
    sys.exit(main())
