"""`txl analyse length`: perplexity or bits at each attention length, as in the paper's Table 6."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..config.problems import Problems
from ..runtime.terminal import show_pairs, show_table
from .shared import ComparisonOptions, Precision, Size, Sizes

if TYPE_CHECKING:
    from ..analysis.comparison import Comparison
    from ..analysis.length import Sweep


@dataclass(frozen=True)
class Length(ComparisonOptions):
    """Measure perplexity or bits at each attention length, and find the shortest one that is as good as the best:
    Table 6."""

    attn_len: Sizes = ()
    """By default from a quarter of the tgt_len of training to eight times the tgt_len of training."""
    max_tokens: int = 0
    """Score at most this many tokens; 0: all."""
    batch_size: Size = None
    precision: Precision = "auto"

    def run(self) -> None:
        """Print the figure of each run at each attention length; mark the best length and the shortest as good.

        Files: `length.json` and the picture.
        """
        import numpy as np

        from ..analysis.figures import Curve, draw_curves, if_possible
        from ..analysis.length import TOLERANCE, attention_lengths, sweep
        from ..runtime.files import write_whole

        problems = Problems()
        problems.bound(self, "max_tokens", least=0)
        problems.bound(self, "attn_len", "batch_size", least=1)
        group = self.compared(self.precision, problems)
        lengths = list(self.attn_len) or attention_lengths([run.config for run in group.runs])
        sweeps = []
        for run in group.runs:
            own = run.config.eval
            how = replace(own, max_tokens=self.max_tokens, batch_size=self.batch_size or own.batch_size)
            model, precision = run.load().model, group.precision
            sweeps.append(sweep(model, run.config, group.split, lengths, group.vocab, how=how, precision=precision))
        facts = {"tolerance": TOLERANCE} | group.facts(map(_as_figures, sweeps))
        folder, curves = self.folder(group, "length"), {}
        write_whole(folder / "length.json", json.dumps(facts, indent=1) + "\n")
        for name, run, each in zip(group.names, group.runs, sweeps, strict=True):
            trained = run.config.train.tgt_len + run.config.train.mem_len
            own = {each.attn_lens.index(trained): "trained"} if trained in each.attn_lens else {}
            marks = own | {each.shortest: "as good as the best"} | {each.best: "best"}
            curves[name] = Curve(np.array(each.attn_lens), np.array(each.figures), marks=marks)
        if_possible(lambda: draw_curves(folder / "length", {"": curves}, "attention length in tokens", group.unit))
        if self.json:
            print(json.dumps(facts))
        else:
            _show_lengths(group, sweeps)
            print(f"The picture is in {folder}.")


def _as_figures(each: Sweep) -> dict[str, Any]:
    results = [result.to_json() | {"attn_len": n} for n, result in zip(each.attn_lens, each.results, strict=True)]
    chosen = {"best": each.attn_lens[each.best], "shortest": each.attn_lens[each.shortest]}
    return {"read": each.description} | chosen | {"results": results}


def _show_lengths(group: Comparison, sweeps: Sequence[Sweep]) -> None:
    from ..analysis.length import TOLERANCE

    close = f"shortest within {TOLERANCE:.1%} of the best {group.unit}"
    rows = []
    for name, each in zip(group.names, sweeps, strict=True):
        for index, (attn_len, result) in enumerate(zip(each.attn_lens, each.results, strict=True)):
            notes = ["best"] * (index == each.best) + [close] * (index == each.shortest)
            figures = [f"{result.headline[1]:.4f}", f"{result.loss:.4f}"]
            counts = [f"{result.targets:,}", f"{result.tokens_per_second:,.0f}"]
            rows.append([name, f"{attn_len:,}", *figures, *counts, ", ".join(notes)])
    show_table(group.split.title, ["run", "attn_len", group.unit, "loss", "targets", "tokens/s", ""], rows)
    show_pairs("\nHow each reads", {name: each.description for name, each in zip(group.names, sweeps, strict=True)})
