"""`txl analyse recl` and `txl analyse length`: compare how much context helps trained models."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ...analysis import recl as measures
from ...analysis.figures import Curve, Panel, draw_curves, draw_gains
from ...analysis.length import TOLERANCE, Sweep, attention_lengths, sweep
from ...config.problems import Problems
from ...data.vocab import Vocab
from ...evaluation.measures import figure
from ...mistake import Mistake
from ...run import find_checkpoint, load_vocab
from ...runtime.files import write_whole
from ...runtime.terminal import show_pairs, show_table
from ..options.analyse import Length, Recl
from .report import names
from .trained import Text, Trained


class Group:
    """Runs with the same vocabulary, and the text on which they are compared."""

    def __init__(self, options: Recl | Length, problems: Problems):
        """Open the runs and the text. If there are `problems`, raise `Mistake` before that."""
        problems.bound(options, "batch_size", least=1)
        if not options.runs:
            problems.append("RUN must be at least one run, got none.")
        problems.refuse()
        self.runs: list[Trained] = [Trained(run, options.device, options.precision) for run in options.runs]
        for each in self.runs:
            each.problems.refuse()
        first, vocabs = self.runs[0], [load_vocab(find_checkpoint(each.run)) for each in self.runs]
        problems += [
            f"All runs must have the same vocabulary, because they are compared target by target; {each.run} has "
            f"{vocab}, and {first.run} {'as many others' if str(vocab) == str(vocabs[0]) else vocabs[0]}. Leave one of "
            "them out."
            for each, vocab in zip(self.runs, vocabs, strict=True)
            if vocab != vocabs[0]
        ]
        problems.refuse()
        self.names: list[str] = names([each.run for each in self.runs])
        self.vocab: Vocab = vocabs[0]
        self.precision: str = first.precision
        self.text: Text = first.text(self.vocab, options.data, options.split, "test")
        self.unit: str = figure(self.vocab.unit, 0.0)[0]
        """The unit of the results: ppl or bpc."""

    def facts(self, of_runs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """The JSON entries about the text and each run, with the results of each run."""
        runs = [
            {"run": str(each.run), "name": name, "kind": each.config.model.kind, **figures}
            for each, name, figures in zip(self.runs, self.names, of_runs, strict=True)
        ]
        return self.text.about | {"precision": self.precision, "runs": runs}


def recl(options: Recl) -> dict[str, Any]:
    """Print the relative effective context length of each run (Table 8), and its losses by context length.

    Files: `recl.json`, `recl.npz` (all losses) and the pictures (Figures 3 and 4).
    """
    step, longest, seed = options.step, options.max_context, options.seed
    problems = Problems()
    problems.bound(options, "step", "positions", least=1)
    problems.bound(options, "seed", least=0)
    problems.bound(options, "r", above=0, most=1)
    problems.bound(options, "threshold", above=0, below=1)
    if longest < 2 * step or (step > 0 and longest % step):
        problems.append(f"--max-context must be a multiple of --step = {step:,}, at least twice it, got {longest:,}.")
    group = Group(options, problems)
    split = group.text.split
    targets = measures.sample_positions(
        len(split.ids), options.positions, step=step, longest=longest, seed=seed, documents=split.documents
    )
    contexts = np.arange(step, longest + 1, step)
    losses, readings = _losses(group, options, contexts, targets)
    draws = measures.draw(targets, longest, seed)
    shares = [measures.measure(losses, contexts, share, draws, threshold=options.threshold) for share in options.r]
    mean, interval = measures.mean_losses(losses, draws)
    figures = [
        {"read": read, "loss": mean[i].tolist(), "loss_interval": interval[:, i].tolist()}
        for i, read in enumerate(readings)
    ]
    facts = group.facts(figures) | {"positions": options.positions, "seed": seed, "threshold": options.threshold}
    facts |= {"contexts": contexts.tolist(), "recl": [_as_json(share, group.names) for share in shares]}
    if options.out is not None:
        arrays = {"losses": losses.astype(np.float32), "positions": targets, "contexts": contexts}
        save_arrays(options.out / "recl", facts, arrays | {"names": np.array(group.names)})
        draw_gains(options.out / "recl_gains", group.names, contexts, shares, options.threshold)
        known = np.exp if group.unit == "ppl" else partial(np.multiply, 1 / np.log(2))
        curves = {n: Curve(contexts, known(mean[i]), known(interval[:, i])) for i, n in enumerate(group.names)}
        draw_curves(options.out / "recl_context", [Panel("all positions", curves)], "context in tokens", group.unit)
    if options.json:
        print(json.dumps(facts))
    else:
        heading = f"RECL on {group.text.title}: {options.positions:,} positions, threshold {options.threshold:g}"
        _show_recl(heading, group, facts, shares)
    return facts


def _losses(
    group: Group, options: Recl, contexts: Int[np.ndarray, " L"], targets: Int[np.ndarray, " P"]
) -> tuple[Float[np.ndarray, "I L P"], list[str]]:
    """The losses of each run, and a description of how it reads. One model is in memory at a time."""
    losses, readings = [], []
    score: Any = partial(measures.true_losses, ids=group.text.split.ids, positions=targets, precision=group.precision)
    for run in group.runs:
        plan = measures.feeding_of(run.config, options.max_context, trained_context=options.trained_context)
        seen = np.minimum(contexts, plan.most)
        losses.append(score(run.load().model, contexts=seen, lengths=plan.lengths, batch_size=options.batch_size))
        readings.append(plan.description)
        if not np.isfinite(losses[-1]).all():
            raise Mistake(f"{run.run} gives losses that are not finite, so it cannot be compared. Leave it out.")
    return np.stack(losses), readings


def _as_json(found: measures.Recl, names: Sequence[str]) -> dict[str, Any]:
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


def save_arrays(stem: Path, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write `facts` to `stem`.json and `arrays` to `stem`.npz."""
    write_whole(stem.with_suffix(".json"), json.dumps(facts, indent=1) + "\n")
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    write_whole(stem.with_suffix(".npz"), file.getvalue())


def _show_recl(heading: str, group: Group, facts: Mapping[str, Any], shares: Sequence[measures.Recl]) -> None:
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


def _length_text(found: measures.Length, i: int) -> str:
    (low, high), reached = found.interval[:, i], found.reached[i]
    return f"{'' if reached else '>= '}{found.tokens[i]:,} [{low:,}, {high:,}]"


def length(options: Length) -> dict[str, Any]:
    """Print perplexity or bits of each run at each attention length; mark the best length and the shortest as good.

    Files: `length.json` and the picture.
    """
    problems = Problems()
    problems.bound(options, "max_tokens", least=0)
    problems.bound(options, "stride", "attn_len", least=1)
    group = Group(options, problems)
    lengths = list(options.attn_len) or attention_lengths([run.config for run in group.runs])
    sweeps = []
    for run in group.runs:
        own = run.config.eval
        how = replace(own, max_tokens=options.max_tokens, batch_size=options.batch_size or own.batch_size)
        reading = {"how": how, "stride": options.stride, "precision": group.precision}
        sweeps.append(sweep(run.load().model, run.config, group.text.split, lengths, group.vocab, **reading))
    facts = {"tolerance": TOLERANCE} | group.facts(map(_as_figures, sweeps))
    if options.out is not None:
        write_whole(options.out / "length.json", json.dumps(facts, indent=1) + "\n")
        curves = {}
        for name, each in zip(group.names, sweeps, strict=True):
            marks = {each.shortest: "as good"} | {each.best: "best"}
            curves[name] = Curve(np.array(each.attn_lens), np.array(each.figures), marks=marks)
        draw_curves(options.out / "length", [Panel("", curves)], "attention length in tokens", group.unit)
    if options.json:
        print(json.dumps(facts))
    else:
        _show_lengths(group, sweeps)
    return facts


def _as_figures(each: Sweep) -> dict[str, Any]:
    results = [result.to_json() | {"attn_len": n} for n, result in zip(each.attn_lens, each.results, strict=True)]
    chosen = {"best": each.attn_lens[each.best], "shortest": each.attn_lens[each.shortest]}
    return {"read": each.description} | chosen | {"results": results}


def _show_lengths(group: Group, sweeps: Sequence[Sweep]) -> None:
    close = f"shortest within {TOLERANCE:.1%} of the best {group.unit}"
    rows = []
    for name, each in zip(group.names, sweeps, strict=True):
        for index, (attn_len, result) in enumerate(zip(each.attn_lens, each.results, strict=True)):
            notes = ["best"] * (index == each.best) + [close] * (index == each.shortest)
            figures = [f"{result.headline[1]:.4f}", f"{result.loss:.4f}"]
            counts = [f"{result.targets:,}", f"{result.tokens_per_second:,.0f}"]
            rows.append([name, f"{attn_len:,}", *figures, *counts, ", ".join(notes)])
    show_table(group.text.title, ["run", "attn_len", group.unit, "loss", "targets", "tokens/s", ""], rows)
    show_pairs("\nHow each reads", {name: each.description for name, each in zip(group.names, sweeps, strict=True)})
