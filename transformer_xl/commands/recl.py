"""`txl analyse recl`: how much context helps trained models, as the paper's RECL: Table 8, Figures 3 and 4."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from ..config.problems import Problems
from ..runtime.terminal import show_pairs, show_table
from .shared import Comparison, ComparisonOptions, Precision

if TYPE_CHECKING:
    from ..analysis import recl as measures


@dataclass(frozen=True)
class Recl(ComparisonOptions):
    """Compare the relative effective context length of models: Table 8, Figures 3 and 4."""

    r: Annotated[tuple[float, ...], arg(metavar="R ...")] = (0.1, 0.5, 1.0)
    """Shares of the positions to use: 0.1 uses the 10% with the highest loss."""
    step: int = 100
    """Context lengths are multiples of this (the paper's Delta)."""
    max_context: int = 1000
    positions: int = 2000
    """Number of targets to sample."""
    seed: int = 0
    batch_size: int = 16
    """Number of windows in a batch."""
    precision: Precision = "fp32"
    """fp32 by default, because rounding changes losses, and small gains count."""

    def run(self) -> None:
        """Files: `recl.json`, `recl.npz` (all losses) and the pictures (Figures 3 and 4)."""
        import numpy as np

        from ..analysis import recl as measures
        from ..analysis.figures import Curve, draw_curves, draw_gains, if_possible, save_arrays

        step, longest, seed = self.step, self.max_context, self.seed
        problems = Problems()
        problems.bound(self, "step", "positions", "batch_size", least=1)
        problems.bound(self, "seed", least=0)
        problems.bound(self, "r", above=0, most=1)
        if longest < 2 * step or (step > 0 and longest % step):
            problems.append(
                f"--max-context must be a multiple of --step = {step:,}, at least twice it, got {longest:,}."
            )
        group = self.compared(self.precision, problems)
        split = group.split
        documents = np.unique(np.concatenate([split.starts(run.config.model.document_end) for run in group.runs]))
        targets = measures.sample_positions(
            len(split.ids), self.positions, step=step, longest=longest, seed=seed, documents=documents
        )
        contexts = np.arange(step, longest + 1, step)
        found = (measures.losses_of(run, split.ids, targets, contexts, self.batch_size) for run in group.runs)
        each_loss, readings = zip(*found, strict=True)
        losses = np.stack(each_loss)
        draws = measures.resample(targets, longest, seed)
        shares = [measures.measure(losses, contexts, share, draws) for share in self.r]
        mean, interval = measures.mean_losses(losses, draws)
        figures = [
            {"read": read, "loss": mean[i].tolist(), "loss_interval": interval[:, i].tolist()}
            for i, read in enumerate(readings)
        ]
        facts = group.facts(figures) | {"positions": self.positions, "seed": seed, "threshold": measures.THRESHOLD}
        facts |= {"contexts": contexts.tolist(), "recl": [_as_json(share, group.names) for share in shares]}
        folder = self.out or group.runs[0].path / "recl"
        arrays = {"losses": losses.astype(np.float32), "positions": targets, "contexts": contexts}
        save_arrays(folder / "recl", facts, arrays | {"names": np.array(group.names)})
        known = np.exp if group.unit == "ppl" else partial(np.multiply, 1 / np.log(2))
        curves = {n: Curve(contexts, known(mean[i]), known(interval[:, i])) for i, n in enumerate(group.names)}
        paths = if_possible(
            lambda: [
                *draw_gains(folder / "recl_gains", group.names, contexts, shares),
                *draw_curves(folder / "recl_context", {"all positions": curves}, "context in tokens", group.unit),
            ]
        )
        if self.json:
            print(json.dumps(facts))
        else:
            heading = f"RECL on {group.split.title}: {self.positions:,} positions, threshold {measures.THRESHOLD:g}"
            _show_recl(heading, group, facts, shares)
            print(f"{'Pictures and arrays' if paths else 'Arrays'} are in {folder}.")


def _as_json(found: measures.ReclResult, names: Sequence[str]) -> dict[str, Any]:
    """For each run: its RECL, its RECL without gains that are lost again, and its curves."""
    runs = []
    for i, name in enumerate(names):
        length, net = (
            {name: values[..., i].tolist() for name, values in each._asdict().items()}
            for each in (found.length, found.net)
        )
        curves = {curve: getattr(found, curve)[i].tolist() for curve in ("relative", "back", "perplexity")}
        ends = {n: getattr(found, n)[:, i].tolist() for n in ("relative_interval", "perplexity_interval")}
        runs.append({"name": name, "recl": length.pop("tokens"), **length, "net": net, **curves, **ends})
    return {"r": found.r, "runs": runs}


def _show_recl(
    heading: str, group: Comparison, facts: Mapping[str, Any], shares: Sequence[measures.ReclResult]
) -> None:
    from ..evaluation.score import figure

    net = "\nnet of what going back gains"
    for words, lengths in {heading: [s.length for s in shares], net: [s.net for s in shares]}.items():
        rows = [[name, *(_length_text(length, i) for length in lengths)] for i, name in enumerate(group.names)]
        show_table(f"{words} [95 % interval]", ["run", *(f"r = {share.r:g}" for share in shares)], rows)
    losses = [run["loss"] for run in facts["runs"]]
    rows = [
        [f"{context:,}", *(f"{figure(group.vocab.unit, loss)[1]:.4f}" for loss in at_context)]
        for context, *at_context in zip(facts["contexts"], *losses, strict=True)
    ]
    show_table(f"\n{group.unit} by context", ["context", *group.names], rows)
    show_pairs("\nHow each reads", {run["name"]: run["read"] for run in facts["runs"]})


def _length_text(found: measures.EffectiveLength, i: int) -> str:
    (low, high), reached = found.interval[:, i], found.reached[i]
    return f"{'' if reached else '>= '}{found.tokens[i]:,} [{low:,}, {high:,}]"
