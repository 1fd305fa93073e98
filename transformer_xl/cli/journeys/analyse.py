"""`txl analyse recl` and `txl analyse length`: how much context helps trained models, side by side."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from ...analysis.figures import Curve, Panel, draw_curves, draw_gains
from ...analysis.length import TOLERANCE, Sweep, attention_lengths, sweep
from ...analysis.recl import (
    THRESHOLD,
    Feeding,
    Length,
    Recl,
    draw,
    feeding,
    mean_losses,
    measure,
    sample_positions,
    true_losses,
)
from ...checkpoint import find_checkpoint, load_vocab
from ...config.problems import Problems, as_options
from ...config.settings import Lengths, RunConfig
from ...data.corpus import Corpus
from ...evaluation.measures import figure
from ...mistake import Mistake
from ...runtime.files import write_whole
from ...runtime.terminal import show_pairs, show_table
from .texts import Part, corpus_for, part_of
from .trained import Text, Trained


@dataclass(frozen=True)
class Group:
    """Runs of one vocabulary, and the corpus they are compared on."""

    runs: list[Trained]
    configs: list[RunConfig]
    """The settings of each, without `clamp_len` if none was asked for."""
    corpus: Corpus

    @property
    def names(self) -> list[str]:
        """The name of each run's folder, or its path if another run has that name."""
        repeated = Counter(each.run.name for each in self.runs)
        return [each.run.name if repeated[each.run.name] == 1 else str(each.run) for each in self.runs]

    @property
    def precision(self) -> str:
        return self.runs[0].precision

    def text(self, asked: Part | None) -> Text:
        return Text(self.corpus, part_of(self.corpus, asked, "test"))

    def about(self, i: int) -> dict[str, Any]:
        """What JSON says of a run."""
        return {"run": str(self.runs[i].run), "name": self.names[i], "kind": self.configs[i].model.kind}

    @property
    def unit(self) -> str:
        """The unit of figures: ppl or bpc."""
        return figure(self.corpus.unit, 0.0)[0]


def _group(
    runs: Sequence[Path],
    problems: Problems,
    data: str | None,
    asked: Part | None,
    clamp_len: Sequence[int | None],
    device: str,
    precision: str,
) -> Group:
    """Open the runs and the corpus; a `Mistake` for `problems` comes before."""
    problems.refuse()
    found = [Trained(run, device, precision) for run in runs]
    for each in found:
        each.problems.refuse()
    first, vocabs = found[0], [load_vocab(find_checkpoint(each.run)) for each in found]
    problems += [
        f"All runs must have the same vocabulary, because they are compared target by target; {each.run} has {vocab}, "
        f"and {first.run} {'as many others' if str(vocab) == str(vocabs[0]) else vocabs[0]}. Leave one of them out."
        for each, vocab in zip(found, vocabs, strict=True)
        if vocab != vocabs[0]
    ]
    problems.refuse()
    corpus = corpus_for(first.run, first.config.corpus, vocabs[0], data, asked)
    configs = [_without_clamp(each.config) if None in clamp_len else each.config for each in found]
    return Group(found, configs, corpus)


def _without_clamp(config: RunConfig) -> RunConfig:
    train, how = replace(config.train, clamp_len=None), replace(config.eval, clamp_len=None)
    return replace(config, train=train, eval=how)


class Measured(NamedTuple):
    """A group's losses by context length, and the figures from them."""

    group: Group
    plans: list[Feeding]
    contexts: Int[np.ndarray, " L"]
    positions: Int[np.ndarray, " P"]
    losses: Float[np.ndarray, "I L P"]
    shares: list[Recl]
    mean: Float[np.ndarray, "I L"]
    interval: Float[np.ndarray, "2 I L"]

    @property
    def facts(self) -> dict[str, Any]:
        losses = zip(self.mean.tolist(), self.interval.swapaxes(0, 1).tolist(), strict=True)
        runs = [
            self.group.about(i) | {"read": plan.told, "loss": mean, "loss_interval": ends}
            for i, (plan, (mean, ends)) in enumerate(zip(self.plans, losses, strict=True))
        ]
        found = [_as_json(share, self.group.names) for share in self.shares]
        return {"contexts": self.contexts.tolist(), "runs": runs, "recl": found}


def recl(
    runs: Sequence[Path],
    *,
    data: str | None = None,
    split: Part | None = None,
    r: Sequence[float] = (0.1, 0.5, 1.0),
    step: int = 100,
    max_context: int = 1000,
    positions: int = 2000,
    threshold: float = THRESHOLD,
    clamp_len: Sequence[int | None] = (),
    trained_context: bool = False,
    seed: int = 0,
    batch_size: int = 16,
    device: str = "auto",
    precision: str = "fp32",
    out: Path | None = None,
    as_json: bool = False,
) -> dict[str, Any]:
    """Print the relative effective context length of each run in their group (Table 8), and their losses by context.

    `data` replaces the text of the first run; `split` None is test, or all of a text without splits. `feeding` explains
    `trained_context` and the one value of `clamp_len`; None in it switches clamping off, and () is the run's own. The
    default precision is fp32, because rounding changes losses, and small gains count. `out` is a folder for
    `recl.json`, `recl.npz` (all losses) and the pictures (Figures 3 and 4).

    Raises:
        Mistake, OSError: a sentence for each mistake.
    """
    problems = Problems(_least(1, step=step, positions=positions, batch_size=batch_size, runs=len(runs)))
    problems += [*_least(0, seed=seed), *_clamp_problems(clamp_len)]
    problems.refuse()
    problems += _recl_problems(r, step, max_context, threshold)
    group = _group(runs, problems, data, split, clamp_len, device, precision)
    text = group.text(split)
    sample = {"step": step, "longest": max_context, "seed": seed, "documents": text.split.documents}
    targets = sample_positions(len(text.split.ids), positions, **sample)
    contexts = np.arange(step, max_context + 1, step)
    given = next(iter(clamp_len), None)
    plans = [feeding(c, max_context, clamp_len=given, trained_context=trained_context) for c in group.configs]
    options = {"batch_size": batch_size, "precision": group.precision}
    score = partial(true_losses, ids=text.split.ids, positions=targets, **options)
    losses, draws = _losses(group, plans, contexts, score), draw(targets, max_context, seed)
    shares = [measure(losses, contexts, share, draws, threshold=threshold) for share in r]
    found = Measured(group, plans, contexts, targets, losses, shares, *mean_losses(losses, draws))
    facts = text.about | {"positions": positions, "seed": seed, "precision": group.precision}
    facts |= {"threshold": threshold} | found.facts
    if out is not None:
        _save_recl(out, facts, found)
    if as_json:
        print(json.dumps(facts))
    else:
        _show_recl(f"RECL on {text.title}: {positions:,} positions, threshold {threshold:g}", found)
    return facts


def _recl_problems(r: Sequence[float], step: int, max_context: int, threshold: float) -> Iterable[str]:
    yield from (f"r must be above 0 and at most 1, got {share:g}." for share in r if not 0 < share <= 1)
    if not 0 < threshold < 1:
        yield f"threshold must be above 0 and below 1, got {threshold:g}. The paper's is {THRESHOLD:g}."
    if max_context % step or max_context < 2 * step:
        yield f"max_context must be a multiple of step = {step:,}, at least twice it, got {max_context:,}."


def _losses(
    group: Group, plans: Sequence[Feeding], contexts: Int[np.ndarray, " L"], score: Any
) -> Float[np.ndarray, "I L P"]:
    """The losses of each run, one model in memory at a time."""
    found = []
    for run, plan in zip(group.runs, plans, strict=True):
        found.append(score(run.load().model, contexts=np.minimum(contexts, plan.most), lengths=plan.lengths))
        if not np.isfinite(found[-1]).all():
            raise Mistake(f"{run.run} gives losses that are not finite, so it cannot be compared. Leave it out.")
    return np.stack(found)


def _as_json(found: Recl, names: Sequence[str]) -> dict[str, Any]:
    """For each run: its RECL, its RECL net of losses that rise again, and its curves."""
    runs = []
    for i, name in enumerate(names):
        length, net = _length(found.length, i), _length(found.net, i)
        curves = {curve: getattr(found, curve)[i].tolist() for curve in ("relative", "back", "perplexity")}
        ends = {n: getattr(found, n)[:, i].tolist() for n in ("relative_interval", "perplexity_interval")}
        runs.append({"name": name, "recl": length.pop("tokens"), **length, "net": net, **curves, **ends})
    return {"r": found.r, "runs": runs}


def _length(found: Length, i: int) -> dict[str, Any]:
    return {name: values[..., i].tolist() for name, values in found._asdict().items()}


def _save_recl(out: Path, facts: Mapping[str, Any], found: Measured) -> None:
    names, contexts = found.group.names, found.contexts
    write_whole(out / "recl.json", json.dumps(facts, indent=1) + "\n")
    file = io.BytesIO()
    losses = found.losses.astype(np.float32)
    np.savez_compressed(file, losses=losses, positions=found.positions, contexts=contexts, names=np.array(names))
    write_whole(out / "recl.npz", file.getvalue())
    draw_gains(out / "recl_gains", names, contexts, found.shares, facts["threshold"])
    known = np.exp if found.group.unit == "ppl" else partial(np.multiply, 1 / np.log(2))
    curves = {name: Curve(contexts, known(found.mean[i]), known(found.interval[:, i])) for i, name in enumerate(names)}
    draw_curves(out / "recl_context", [Panel("all positions", curves)], "context in tokens", found.group.unit)


def _show_recl(heading: str, found: Measured) -> None:
    names, unit = found.group.names, found.group.corpus.unit
    net = "\nnet of what going back gains"
    for words, lengths in {heading: [s.length for s in found.shares], net: [s.net for s in found.shares]}.items():
        rows = [[name, *(_told(length, i) for length in lengths)] for i, name in enumerate(names)]
        show_table(f"{words} [95 % interval]", ["run", *(f"r = {share.r:g}" for share in found.shares)], rows)
    rows = [
        [f"{c:,}", *(f"{figure(unit, loss)[1]:.4f}" for loss in losses)]
        for c, losses in zip(found.contexts.tolist(), found.mean.T.tolist(), strict=True)
    ]
    show_table(f"\n{found.group.unit} by context", ["context", *names], rows)
    show_pairs("\nHow each reads", {name: plan.told for name, plan in zip(names, found.plans, strict=True)})


def _told(found: Length, i: int) -> str:
    (low, high), reached = found.interval[:, i], found.reached[i]
    return f"{'' if reached else '>= '}{found.tokens[i]:,} [{low:,}, {high:,}]"


def length(
    runs: Sequence[Path],
    *,
    data: str | None = None,
    split: Part | None = None,
    attn_len: Sequence[int] = (),
    max_tokens: int = 0,
    stride: int = 8,
    clamp_len: Sequence[int | None] = (),
    batch_size: int | None = None,
    device: str = "auto",
    precision: str = "auto",
    out: Path | None = None,
    as_json: bool = False,
) -> dict[str, Any]:
    """Print perplexity or bits of each run at each attention length, the best, and the shortest that is as good.

    `attention_lengths` gives the default lengths; `sweep` explains how a run reads. `data` replaces the text of the
    first run; `split` None is test, or all of a text without splits. `clamp_len` is as in `recl`. `out` is a folder for
    `length.json` and the picture.

    Raises:
        Mistake, OSError: a sentence for each mistake.
    """
    least = {"stride": stride, "attn_len": min(attn_len, default=1), "batch_size": batch_size, "runs": len(runs)}
    problems = Problems([*_least(0, max_tokens=max_tokens), *_least(1, **least), *_clamp_problems(clamp_len)])
    group = _group(runs, problems, data, split, clamp_len, device, precision)
    text, lengths = group.text(split), list(attn_len) or attention_lengths(group.configs)
    options = {"clamp_len": next(iter(clamp_len), None), "stride": stride, "precision": group.precision}
    sweeps = []
    for run, config in zip(group.runs, group.configs, strict=True):
        how = replace(config.eval, max_tokens=max_tokens, batch_size=batch_size or config.eval.batch_size)
        sweeps.append(sweep(run.load().model, config, text.split, lengths, text.corpus.vocab, how=how, **options))
    facts = text.about | {"tolerance": TOLERANCE, "precision": group.precision}
    facts |= {"runs": [group.about(i) | _swept(each) for i, each in enumerate(sweeps)]}
    if out is not None:
        write_whole(out / "length.json", json.dumps(facts, indent=1) + "\n")
        _draw_lengths(out / "length", group, sweeps)
    if as_json:
        print(json.dumps(facts))
    else:
        _show_lengths(text.title, group, sweeps)
    return facts


def _swept(each: Sweep) -> dict[str, Any]:
    results = [result.to_json() | {"attn_len": n} for n, result in zip(each.attn_lens, each.results, strict=True)]
    chosen = {"best": each.attn_lens[each.best], "shortest": each.attn_lens[each.shortest]}
    return {"read": each.told} | chosen | {"results": results}


def _draw_lengths(stem: Path, group: Group, sweeps: Sequence[Sweep]) -> None:
    curves = {}
    for name, each in zip(group.names, sweeps, strict=True):
        marks = {each.shortest: "as good"} | {each.best: "best"}
        curves[name] = Curve(np.array(each.attn_lens), np.array(each.figures), marks=marks)
    draw_curves(stem, [Panel("", curves)], "attention length in tokens", group.unit)


def _show_lengths(heading: str, group: Group, sweeps: Sequence[Sweep]) -> None:
    close = f"shortest within {TOLERANCE:.1%} of the best {group.unit}"
    rows = []
    for name, each in zip(group.names, sweeps, strict=True):
        for place, (attn_len, result) in enumerate(zip(each.attn_lens, each.results, strict=True)):
            notes = ["best"] * (place == each.best) + [close] * (place == each.shortest)
            figures = [f"{result.headline[1]:.4f}", f"{result.loss:.4f}"]
            counts = [f"{result.targets:,}", f"{result.tokens_per_second:,.0f}"]
            rows.append([name, f"{attn_len:,}", *figures, *counts, ", ".join(notes)])
    show_table(heading, ["run", "attn_len", group.unit, "loss", "targets", "tokens/s", ""], rows)
    show_pairs("\nHow each reads", {name: each.told for name, each in zip(group.names, sweeps, strict=True)})


def _least(bound: int, **given: int | None) -> Iterable[str]:
    return (
        f"{name} must be at least {bound}, got {value}."
        for name, value in given.items()
        if value is not None and value < bound
    )


def _clamp_problems(clamp_len: Sequence[int | None]) -> Problems:
    problems = Problems()
    for given in clamp_len:
        problems.attempt(partial(Lengths, tgt_len=1, mem_len=0, clamp_len=given), as_options(["clamp_len"]))
    if len(clamp_len) > 1:
        problems.append(f"--clamp-len must be one distance or none, got {len(clamp_len)} of them.")
    return problems
