"""The loop around training's steps: it measures, shows, saves, and ends after a step when a signal asks for it.

Of many ranks the first one alone writes and speaks; all of them take part in what it writes of.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import latest, load_training, load_weights, save_checkpoint, step_folder, weights
from ..config.settings import RunConfig, TrainConfig
from ..data.corpora.detokenise import readable
from ..data.corpus import Corpus
from ..data.datasets import is_tokenised
from ..data.loader import StreamLoader
from ..evaluation.generate import Sampling, generate
from ..evaluation.score import EvalResult, evaluate
from ..mistake import Mistake
from ..model.transformer_xl import TransformerXL
from ..runtime.files import remove_unfinished
from ..runtime.ranks import Ranks
from ..runtime.terminal import ProgressPrinter, seconds_left
from .metric_log import MetricLog, progress_text
from .optim import learning_rate
from .step import Pace, Trainer
from .trackers import Trackers
from .writer import BackgroundWriter


def fit(
    model: TransformerXL,
    corpus: Corpus,
    config: RunConfig,
    run: Path,
    *,
    resume: bool = False,
    trackers: Trackers | None = None,
    ranks: Ranks | None = None,
    replan: Callable[[Trainer], TrainConfig] | None = None,
) -> bool:
    """Train `model` on `corpus` as `config.train` says, and leave checkpoints and metrics in the folder `run`.

    Device, precision and backend must be settled, not "auto". With `resume` training goes on from the last checkpoint.

    Args:
        trackers: where figures and samples go besides `metrics.jsonl`; nowhere if None, whatever `config` names.
        ranks: those that train together, each with a `model` of the same weights; None: this process is alone.
        replan: called after each step; returns the settings for the rest of the run, which ends when `max_steps` steps
            are done. It serves a process that is alone, and that has to end at a given time.

    Returns:
        False if SIGTERM, SIGINT, SIGHUP or a closed pipe ended it early, after the step was done and saved.

    Raises:
        FloatingPointError: too many steps in a row had no finite loss and gradient.
        OSError: a checkpoint or the metrics could not be written.
    """
    settings, ranks = config.train, ranks or Ranks()
    assert replan is None or ranks.size == 1, "ranks would each have a plan of their own"
    run.mkdir(parents=True, exist_ok=True)
    model.to(settings.device).train()
    last = latest(run) if resume else None
    if last is not None:
        load_weights(model, last)
    trainer = Trainer(model, train_segments(corpus, config), settings, ranks=ranks)
    torch.manual_seed(settings.seed + ranks.rank)
    if last is not None:
        trainer.restore(load_training(last))
    _agree(trainer, run)
    with ExitStack() as stack:
        journal = stack.enter_context(_journal(trainer, run, trackers)) if ranks.first else Journal()
        received = stack.enter_context(_deferred_signals(ranks))
        aside = stack.enter_context(BackgroundWriter(kept=ranks.first))  # waited for while signals still wait
        stack.enter_context(_little_garbage())
        _loop(trainer, corpus, config, run, journal, aside, received, replan)
        aside.wait()
        [signals] = ranks.total([len(received)])  # and none ends before what was saved is there
    return trainer.step >= trainer.config.max_steps and not signals


def _agree(trainer: Trainer, run: Path) -> None:
    steps = [int(step) for step in trainer.ranks.gather(torch.tensor(trainer.step))]
    if len(set(steps)) > 1:
        raise Mistake(
            f"The ranks must go on from one step, got {', '.join(map(str, steps))}. Have all machines see {run}."
        )


def train_segments(corpus: Corpus, config: RunConfig) -> StreamLoader:
    """The training split as a run reads it, epoch after epoch."""
    settings = config.train
    shuffle = None
    if config.corpus.shuffle_lines:
        assert corpus.vocab.line_end is not None, "a corpus whose lines are shuffled has line ends"
        shuffle = (corpus.vocab.line_end, settings.seed)
    return StreamLoader(
        corpus.split("train"),
        batch_size=settings.batch_size,
        tgt_len=settings.tgt_len,
        shuffle=shuffle,
        context_len=settings.context_len,
        random_seed=settings.seed if settings.random_tgt_len else None,
    )


@dataclass
class Journal:
    """Where a run tells of itself; without a printer, nowhere."""

    printer: ProgressPrinter | None = None
    metrics: MetricLog | None = None
    trackers: Trackers = field(default_factory=Trackers)

    def log(self, entry: dict[str, Any]) -> None:
        """For machines."""
        if self.metrics is not None:
            self.metrics.log(entry)
        self.trackers.log(entry)

    def note(self, text: str) -> None:
        """For people."""
        if self.printer is not None:
            self.printer.note(text)


@contextmanager
def _journal(trainer: Trainer, run: Path, trackers: Trackers | None) -> Iterator[Journal]:
    remove_unfinished(run)
    metrics = MetricLog(run / "metrics.jsonl")
    metrics.truncate(trainer.step)
    with ProgressPrinter(trainer.config.max_steps, step=trainer.step, log=run / "log.txt") as printer:
        yield Journal(printer, metrics, trackers or Trackers())


def _loop(
    trainer: Trainer,
    corpus: Corpus,
    config: RunConfig,
    run: Path,
    journal: Journal,
    aside: BackgroundWriter,
    received: list[str],
    replan: Callable[[Trainer], TrainConfig] | None,
) -> None:
    stopping = False
    while trainer.step < trainer.config.max_steps and not stopping:
        if journal.printer is not None and journal.printer.reader_left:
            received.append("closed pipe")
        result = trainer.advance(received)
        if replan is not None:
            trainer.config = replan(trainer)
            config = replace(config, train=trainer.config)
        settings = trainer.config
        aside.check()
        stopping, last = result.signals > 0, trainer.step == settings.max_steps
        if journal.printer is not None:
            journal.printer.advance(trainer.step)
        if last or _due(trainer.step, settings.log_every):
            _tell(trainer, corpus.unit, journal)
        if _due(trainer.step, settings.sample_every):
            _sample(trainer, corpus, config, journal)
        valid_loss = None
        if last or _due(trainer.step, settings.eval_every):
            valid_loss = _validate(trainer, corpus, config, journal)
        if valid_loss is not None or stopping or _due(trainer.step, settings.save_every):
            _save(trainer, corpus, config, run, valid_loss, journal, aside)


def _tell(trainer: Trainer, unit: str, journal: Journal) -> None:
    """Show a line to people and log one for machines; counting starts anew."""
    entry, trainer.pace = trainer.pace.entry(unit), Pace()
    lr, most = learning_rate(trainer.step - 1, trainer.config), trainer.config.max_steps
    if journal.printer is not None:
        left = seconds_left(trainer.step, most, trainer.seconds)
        figures = {"loss": entry["loss"], "lr": lr, "tokens_per_second": entry["tokens_per_second"]}
        journal.printer.show(progress_text(unit, **figures, seconds_left=left), trainer.step, most)
    journal.log({"step": trainer.step, "split": "train", **entry, "lr": lr, "seconds": trainer.seconds})


def _validate(trainer: Trainer, corpus: Corpus, config: RunConfig, journal: Journal) -> float:
    """Score the weights as they are and, where there is one, their average; the loss of what is saved."""
    models = {"valid": trainer.readable()}
    if trainer.average is not None:
        models["valid-average"] = trainer.average.model
    loss = 0.0
    for split, model in models.items():
        result = validate(model, corpus, config, trainer.ranks, journal.printer)
        loss = result.loss
        journal.note(f"step {trainer.step}  {split}  {result}{' (partial)' if corpus.caveat else ''}")
        journal.log({"step": trainer.step, "split": split, **corpus.about, **result.to_json()})
    return loss


def validate(
    model: TransformerXL,
    corpus: Corpus,
    config: RunConfig,
    ranks: Ranks | None = None,
    printer: ProgressPrinter | None = None,
) -> EvalResult:
    """The validation split, under the recipe's test lengths, its streams dealt out to the ranks; `printer` shows how
    far that has come."""
    lengths, ranks = config.eval_lengths, ranks or Ranks()
    loader = StreamLoader(
        corpus.split("valid"),
        batch_size=config.eval.batch_size,
        tgt_len=lengths.tgt_len,
        max_tokens=config.train.eval_tokens,
        context_len=config.context_len(lengths),
        rows=ranks.rows(config.eval.batch_size),
    )
    return evaluate(
        model,
        loader if printer is None else printer.follow(loader, "validating"),
        lengths,
        precision=config.train.precision,
        unit=corpus.unit,
        token_sizes=corpus.vocab.token_sizes(),
        total=ranks.total,
    )


def _save(
    trainer: Trainer,
    corpus: Corpus,
    config: RunConfig,
    run: Path,
    valid_loss: float | None,
    journal: Journal,
    aside: BackgroundWriter,
) -> None:
    """Take down everything as it is, and have it written aside."""
    snapshot = aside.snapshot()
    gc.collect()
    model = trainer.model if trainer.average is None else trainer.average.model
    stored = {name: snapshot.take(name, value) for name, value in weights(model).items()}
    training = trainer.state(snapshot)
    if journal.metrics is None:
        return
    journal.metrics.sync()  # before there is a checkpoint that says how far they go
    config = replace(config, model=model.config)
    write = partial(save_checkpoint, step_folder(run, trainer.step), model=stored, vocab=corpus.vocab, config=config)
    aside.begin(partial(write, training=training, valid_loss=valid_loss, keep=trainer.config.keep))


def _sample(trainer: Trainer, corpus: Corpus, config: RunConfig, journal: Journal) -> None:
    model = trainer.readable()
    if journal.printer is None:
        return
    sampling = Sampling(seed=config.train.seed)
    tokens, precision = config.train.sample_tokens, config.train.precision
    lengths = config.writing(config.eval_lengths)
    [text] = generate(model, corpus.vocab, [""], lengths, sampling, tokens, precision=precision)
    sample = readable(text) if is_tokenised(config.corpus.name) else text
    journal.note(f"sample: {sample}")
    journal.log({"step": trainer.step, "sample": sample})


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _little_garbage() -> Iterator[None]:
    """Hide what there is from Python's garbage collector, so that to collect what a checkpoint leaves takes a moment;
    left to itself it would not look at that before it is a quarter of everything. What a caller has hidden stays so."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()  # a model of before may be in cycles
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _deferred_signals(ranks: Ranks) -> Iterator[list[str]]:
    """Collect SIGTERM, SIGINT and SIGHUP until a step is done. A second SIGTERM or SIGINT acts at once, but not on one
    of many ranks, which its launcher ends in time. SIGHUP never does, because a terminal that closes may send it twice
    and after SIGTERM; under nohup it stays ignored. Only the main thread gets signals."""
    received: list[str] = []
    previous: dict[int, Any] = {}
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none

    def receive(number: int, _frame: Any) -> None:
        received.append(signal.Signals(number).name)
        if ranks.size > 1 or number == hangup:
            return
        for other in previous.keys() - {hangup}:
            signal.signal(other, previous[other])
        if number == signal.SIGINT:
            with suppress(OSError):  # not by `print`, which may be what the signal interrupts
                os.write(2, b"\ntxl: This step ends, and is saved. A second Ctrl-C ends at once.\n")

    try:
        for number in (signal.SIGTERM, signal.SIGINT, hangup):
            if number is not None and (number != hangup or signal.getsignal(number) != signal.SIG_IGN):
                previous[number] = signal.signal(number, receive)
    except ValueError:  # not the main thread
        pass
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
