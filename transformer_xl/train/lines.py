"""The lines that training prints: about the run when it begins or goes on, and the figures of some steps."""

from __future__ import annotations

from ..config.settings import RunConfig
from ..data.corpus import Corpus
from ..evaluation.measures import figure
from ..model.transformer_xl import TransformerXL
from ..run import Run
from ..runtime.ranks import Ranks
from ..runtime.terminal import clock


def introduce(run: Run, model: TransformerXL, corpus: Corpus, config: RunConfig, ranks: Ranks) -> None:
    """Print and log the lines about a run that begins or goes on."""
    last = run.latest
    why = "" if last else run.facts()["why"]
    for line in filter(None, [f"{describe(model, corpus, config, ranks)}; {run.path}", why, *corpus.notes]):
        run.say(line)
    if last is not None:
        step, most = run.step, config.train.max_steps
        ended = f" All {most:,} steps are done; a higher train.max_steps goes on." if step >= most else ""
        run.say(f"Resumed from step {step:,} of {most:,} ({last.name}).{ended}")


def describe(model: TransformerXL, corpus: Corpus, config: RunConfig, ranks: Ranks) -> str:
    """One line about the model, the text, the lengths and the machine."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ngrams = 0 if model.ngrams is None else sum(parameter.numel() for parameter in model.ngrams.parameters())
    of_ngrams = f" ({ngrams / 1e6:.2f}M of n-grams and matches)" if ngrams else ""
    train, scored, split = config.train, config.eval_lengths, corpus.header.splits["train"]
    unknown = f" ({split.unknown:,} unknown)" if split.unknown else ""
    together = f", {ranks.size} ranks by {train.parallel}" if ranks.size > 1 else ""
    return (
        f"{parameters / 1e6:.2f}M parameters{of_ngrams} on {corpus.name}, {split.tokens:,} tokens{unknown}, "
        f"{corpus.vocab}; segments of {train.tgt_len:,} after {train.mem_len:,}, scored "
        f"{scored.tgt_len:,} after {scored.mem_len:,}; {train.device}, {train.precision}, {train.backend}{together}"
    )


def progress_text(unit: str, loss: float, lr: float, tokens_per_second: float, seconds_left: float | None) -> str:
    """The line of figures that training prints; `loss` is the mean of nats since the last line."""
    name, value = figure(unit, loss)
    shown = f"{value:8.2f}" if name == "ppl" else f"{value:.4f}"
    speed = f"{tokens_per_second:,.0f} tokens/s"
    return f"loss {loss:.4f}  {name} {shown}  lr {lr:.2e}  {speed}  {clock(seconds_left)} left"
