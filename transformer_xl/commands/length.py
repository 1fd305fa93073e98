"""`txl analyse length`: perplexity or bits at each attention length, as in the paper's Table 6."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from ..config.problems import Problems
from ..runtime.terminal import show_pairs, show_table
from .shared import ComparisonOptions, Precision, Size, Sizes


@dataclass(frozen=True)
class Length(ComparisonOptions):
    """Measure perplexity or bits at each attention length, and find the shortest one that is as good as the best:
    Table 6."""

    attn_len: Sizes = ()
    """By default from a quarter of the longest tgt_len of training to eight times it."""
    max_tokens: int = 0
    """Score at most this many tokens; 0: all."""
    batch_size: Size = None
    precision: Precision = "auto"

    def run(self) -> None:
        """Files: `length.json` and the picture."""
        import numpy as np

        from ..analysis.figures import Curve, draw_curves, if_possible
        from ..analysis.length import TOLERANCE, attention_lengths, sweep
        from ..runtime.files import write_whole

        problems = Problems()
        problems.bound(self, "max_tokens", least=0)
        problems.bound(self, "attn_len", "batch_size", least=1)
        group = self.compared(self.precision, problems)
        lengths = list(self.attn_len) or attention_lengths([run.config for run in group.runs])
        figures, rows, curves, readings = [], [], {}, {}
        close = f"shortest within {TOLERANCE:.1%} of the best {group.unit}"
        for name, run in zip(group.names, group.runs, strict=True):
            own = run.config.eval
            how = replace(own, max_tokens=self.max_tokens, batch_size=self.batch_size or own.batch_size)
            found = sweep(run.load(), group.split, lengths, how=how, precision=run.precision)
            run.refuse_diverged(np.array([result.loss for result in found.results.values()]))
            readings[name] = found.description
            results = []
            for attn_len, result in found.results.items():
                results.append(result.to_json() | {"attn_len": attn_len})
                notes = ["best"] if attn_len == found.best else []
                notes += [close] if attn_len == found.shortest else []
                costs = [f"{result.headline[1]:.4f}", f"{result.loss:.4f}"]
                counts = [f"{result.targets:,}", f"{result.tokens_per_second:,.0f}"]
                rows.append([name, f"{attn_len:,}", *costs, *counts, ", ".join(notes)])
            chosen = {"best": found.best, "shortest": found.shortest}
            figures.append({"read": found.description} | chosen | {"results": results})
            trained = run.config.train.tgt_len + run.config.train.mem_len
            marks = {trained: "trained"} if trained in found.results else {}
            marks |= {found.shortest: "as good as the best", found.best: "best"}  # a point has one mark
            curves[name] = Curve(np.array([*found.figures]), np.array([*found.figures.values()]), marks=marks)
        facts, folder = {"tolerance": TOLERANCE} | group.facts(figures), self.out or group.runs[0].path / "length"
        write_whole(folder / "length.json", json.dumps(facts, indent=1) + "\n")
        title = "attention length in tokens"
        paths = if_possible(lambda: draw_curves(folder / "length", {"": curves}, title, group.unit))
        if self.json:
            print(json.dumps(facts))
            return
        show_table(group.split.title, ["run", "attn_len", group.unit, "loss", "targets", "tokens/s", ""], rows)
        show_pairs("\nHow each reads", readings)
        print(f"The {'picture' if paths else 'table'} is in {folder}.")
