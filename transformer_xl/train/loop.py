"""The training loop: it takes steps, measures, prints and saves. A signal ends it after a step.

Only the first rank writes and prints; the others take part in computing figures and states.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import cast

import torch

from ..config.settings import RunConfig, TrainConfig
from ..data.corpus import Corpus
from ..data.loader import StreamLoader
from ..evaluation.generate import Sampling, generate
from ..evaluation.score import figure, score_split
from ..mistake import Mistake
from ..model.baselines import check_rebuilt
from ..model.sublayer import Sublayer
from ..model.transformer_xl import TransformerXL
from ..run.checkpoint import LoadedModel, load_training, load_weights, save_checkpoint
from ..run.folder import Run
from ..run.parts import read_header, weights
from ..runtime.files import lock_folder
from ..runtime.launcher import rank_and_size
from ..runtime.ranks import Ranks
from ..runtime.terminal import clock
from .agreement import check_alike, check_folder, check_ranks
from .choices import choices, resolve_settings
from .optim import learning_rate
from .resuming import check_resumed, with_own_choices
from .step import Pace, Trainer
from .trackers import Trackers
from .writer import BackgroundWriter


def fit(
    model: TransformerXL,
    corpus: Corpus,
    config: RunConfig,
    folder: str | Path,
    *,
    resume: bool = False,
    trackers: Trackers | None = None,
    ranks: Ranks | None = None,
    begun: Mapping[str, object] | None = None,
) -> bool:
    """Train `model` on `corpus` as `config.train` says, in a run folder as `txl train` writes it (`Run`).

    During training the model uses `train.backend`, unless that is "auto" and the model was built with a backend, and
    recomputes layers if `train.recompute` says so. With `resume` training continues from the last checkpoint, on the
    same text and with the same settings; only `train.backend`, `train.device` and what the command line may change
    (`resuming.MAY_CHANGE`) may differ. `txl train --resume --out RUN` may continue it, too.

    Args:
        trackers: they receive figures and samples; `config.train.trackers` has no effect here. None: no trackers.
        ranks: the processes that train together, each with a `model` of equal weights; None: only this one.
        begun: how the run began, for its `environment.json` (`run.folder.BEGUN`).

    Returns:
        False if SIGTERM, SIGINT, SIGHUP or a closed pipe ended it early, after the step was done and saved.

    Raises:
        FileExistsError: without `resume`, the folder has checkpoints.
        Mistake: a setting does not fit, or is not that of the run to resume; or a checkpoint of `model` would be loaded
            as another model; see `register`.
        FloatingPointError: too many steps in a row had no finite loss and gradient.
        OSError: a checkpoint or the metrics could not be written.
    """
    if ranks is None and (size := rank_and_size()[1]) > 1:
        raise Mistake(
            f"fit must get the ranks of its launch of {size} processes, or each would train alone: `with "
            "transformer_xl.runtime.ranks.join_ranks(config.train.device) as ranks: fit(..., ranks=ranks)`."
        )
    run, ranks = Run(folder), ranks or Ranks()
    if begun is None:
        begun = run.facts() if resume and run.latest else {"chosen": choices(config.train, model.config)}
    named = config.train.backend != "auto"
    config = _checked(model, corpus, config, run, ranks, resume=resume)
    check_alike(config, corpus, run, ranks)
    segments = train_segments(corpus, config)
    with ExitStack() as stack:
        _use_settings(model, config.train, stack, named=named)
        check_lock: Callable[[], None] = lambda: None  # noqa: E731
        if ranks.first:
            check_lock = stack.enter_context(lock_folder(run.path))
            run.begin(config, corpus, ranks=ranks.size, begun=begun)
        check_folder(run, ranks)
        if ranks.first:
            introduce(run, model, corpus, config, ranks)
        model.to(config.train.device).train()
        trainer = _trainer(model, segments, config.train, run.latest if resume else None, ranks)
        if ranks.first:
            run.tidy(config.train.keep)
        received = stack.enter_context(_deferred_signals(ranks))
        # after the line above, so it ends first: signals are still deferred while the last checkpoint is written
        writer = stack.enter_context(BackgroundWriter(kept=ranks.first))
        _Loop(trainer, corpus, config, run, trackers or Trackers(), writer, check_lock, received).train()
        writer.wait()
        [signals] = ranks.total([len(received)])  # no rank ends before the checkpoint is written
    return trainer.step >= trainer.config.max_steps and not signals


def _checked(
    model: TransformerXL, corpus: Corpus, config: RunConfig, run: Run, ranks: Ranks, *, resume: bool
) -> RunConfig:
    """The settings, in which nothing is "auto" any more. What does not fit is refused before anything is written."""
    check_rebuilt(model)
    check_ranks(config.train, ranks)
    if config.train.parallel == "fsdp" and ranks.size > 1 and model.config.qk_norm:
        raise Mistake("train.parallel must be ddp with model.qk_norm: fsdp cannot split its one number. Use ddp.")
    goes_on = run.latest is not None
    if goes_on and not resume:
        raise FileExistsError(f"{run.path} holds checkpoints. Choose another folder, or go on with resume=True.")
    if goes_on:
        config = with_own_choices(run, config)
    config = resolve_settings(replace(config, model=model.config), corpus)
    if config.model.document_end != model.config.document_end:
        raise Mistake(
            f"The model must have document_end = {config.model.document_end}, the id of corpus.document_end, got "
            f"{model.config.document_end}. Build it from what resolve_settings returns."
        )
    if goes_on:
        check_resumed(run, config, corpus)
    for split in ("train", "valid"):
        corpus.split(split)
    return config


def _use_settings(model: TransformerXL, config: TrainConfig, stack: ExitStack, *, named: bool) -> None:
    """Until the stack ends, the model computes with the settings' backend, unless it was built with one and the user
    `named` no other in the settings, and with `recompute`. Then it is as it was."""
    backbone, recomputes = model.backbone, getattr(model.backbone, "recompute", None)
    if config.recompute and recomputes is None:
        kind = model.config.kind
        raise Mistake(f"train.recompute must be false for kind = {kind}, which cannot recompute layers. Leave it out.")
    if config.cuda_graph and recomputes:
        raise Mistake("train.cuda_graph must be false for a model that was built with recompute. Build it without.")
    for part in (each for each in model.modules() if isinstance(each, Sublayer)):
        stack.callback(setattr, part, "backend", part.backend)
        part.backend = config.backend if named or part.backend == "auto" else part.backend
    if config.recompute:
        stack.callback(setattr, backbone, "recompute", recomputes)
        backbone.recompute = True
    if model.ngrams is not None:  # the trainer may change it
        stack.callback(setattr, model.ngrams.table, "sparse", model.ngrams.table.sparse)


def _trainer(
    model: TransformerXL, segments: StreamLoader, config: TrainConfig, last: Path | None, ranks: Ranks
) -> Trainer:
    """The trainer at the start of a run, or at its `last` checkpoint."""
    if last is not None:
        load_weights(model, last)
    trainer = Trainer(model, segments, config, ranks=ranks)
    torch.manual_seed(config.seed + ranks.rank)
    if last is not None:
        trainer.restore(load_training(last))
    return trainer


def check_order(corpus: Corpus, config: RunConfig) -> None:
    """Refuse an order of reading that the training split cannot have."""
    documents, end = corpus.split("train").documents is not None, config.corpus.document_end
    for name, given in {"passes": config.train.passes > 1, "random_tgt_len": config.train.random_tgt_len}.items():
        if documents and given:
            raise Mistake(f"train.{name} is not for documents, which start segments of their own. Leave it out.")
    if not config.corpus.shuffle_lines:
        return
    if documents or corpus.vocab.line_end is None:
        reason = "is made of documents" if documents else "has no line ends"
        raise Mistake(f"corpus.shuffle_lines must be false for {corpus.name}, because it {reason}.")
    if end and corpus.vocab.id_of(end) != corpus.vocab.line_end:
        raise Mistake("corpus.shuffle_lines must be false where corpus.document_end is not the end of a line.")


def train_segments(corpus: Corpus, config: RunConfig) -> StreamLoader:
    """The segments of the training split, epoch after epoch."""
    check_order(corpus, config)
    settings, line_end = config.train, corpus.vocab.line_end
    shuffle = (line_end, settings.seed) if config.corpus.shuffle_lines and line_end is not None else None
    return StreamLoader(
        corpus.split("train"),
        batch_size=settings.batch_size,
        tgt_len=settings.tgt_len,
        shuffle=shuffle,
        context_len=settings.context_len,
        passes=settings.passes,
        seed=settings.seed,
        random_seed=settings.seed if settings.random_tgt_len else None,
    )


@dataclass
class _Loop:
    """A run in training."""

    trainer: Trainer
    corpus: Corpus
    config: RunConfig
    run: Run
    trackers: Trackers
    writer: BackgroundWriter
    check_lock: Callable[[], None]
    received: list[str]
    """The signals so far."""

    def train(self) -> None:
        """Take steps until the last one or a signal. After each, do the reports, validations and saves that are due."""
        trainer, settings, received = self.trainer, self.config.train, self.received
        lacks = self._lacks_validation()
        if trainer.ranks.first:
            self.run.metrics.truncate(trainer.step, validated=not lacks)
        stopping = lacks and not self._validate()
        while trainer.step < settings.max_steps and not stopping:
            if getattr(sys.stdout, "reader_left", False):
                received.append("closed pipe")
            try:
                result = trainer.advance(received)
            except RuntimeError as error:
                if received and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                    raise KeyboardInterrupt from error  # a signal to the whole group has ended the compiler, too
                raise
            self.writer.check()
            stopping = result.signals > 0
            if trainer.step >= settings.max_steps or self._due(settings.log_every):
                self._report()
            if self._due(settings.sample_every):
                self._sample()
            stopping = stopping or (self._validation_due() and not self._validate())
            if stopping or (self._due(settings.save_every) and not self._validation_due()):
                self._save(None)

    def _due(self, every: int) -> bool:
        return every > 0 and self.trainer.step % every == 0

    def _validation_due(self) -> bool:
        return self.trainer.step >= self.config.train.max_steps or self._due(self.config.train.eval_every)

    def _lacks_validation(self) -> bool:
        """Whether the last process ended before it had saved the validation of this step, of which nothing is kept."""
        step = self.trainer.step
        return step > 0 and self._validation_due() and read_header(self.run.checkpoint(step)).get("valid_loss") is None

    def _say(self, line: str) -> None:
        if self.trainer.ranks.first:
            self.run.say(line)

    def _log(self, **entry: object) -> None:
        if self.trainer.ranks.first:
            known = {"step": self.trainer.step, **entry}
            self.run.metrics.log(known)
            self.trackers.log(known)

    def _report(self) -> None:
        """Print a line of figures and log it; then count from 0 again."""
        trainer, unit = self.trainer, self.corpus.vocab.unit
        entry, trainer.pace = trainer.pace.entry(unit), Pace()
        lr, most = learning_rate(trainer.step - 1, trainer.config), trainer.config.max_steps
        left = (most - trainer.step) * trainer.seconds / trainer.step
        text = progress_text(unit, entry["loss"], lr, entry["tokens_per_second"], left)
        self._say(f"step {trainer.step:>{len(str(most))}}/{most}  {text}")
        self._log(split="train", **entry, lr=lr, seconds=trainer.seconds)

    def _validate(self) -> bool:
        """Score the weights and, if there is one, their average, and save with the loss of those that are saved. False:
        a signal came, and nothing is saved."""
        models = {"valid": self.trainer.whole_model()}
        if self.trainer.average is not None:
            models["valid-average"] = cast(TransformerXL, self.trainer.average.module)
        results, config = {}, self.config
        for split, model in models.items():
            results[split] = score_split(
                LoadedModel(model, self.corpus.vocab, config),
                self.corpus.split("valid"),
                config.eval_lengths,
                replace(config.eval, max_tokens=config.train.eval_tokens),
                precision=config.train.precision,
                ranks=self.trainer.ranks,
                stopped=lambda: bool(self.received),
            )
            [signals] = self.trainer.ranks.total([len(self.received)])  # all ranks stop, or none
            if signals:
                return False
        for split, result in results.items():
            self._say(f"step {self.trainer.step}  {split}  {result}")
            self._log(split=split, corpus=self.corpus.name, **result.to_json())
        self._save([*results.values()][-1].loss)
        return True

    def _save(self, valid_loss: float | None) -> None:
        """Copy the state of the run, and write the copy in the background."""
        trainer = self.trainer
        self.writer.wait()
        model = trainer.model if trainer.average is None else trainer.average.module
        stored = {name: self.writer.copy(name, value) for name, value in weights(model).items()}
        training = trainer.state(self.writer)
        if not trainer.ranks.first:
            return
        self.check_lock()
        self.run.metrics.sync()  # before a checkpoint says how far they go
        folder, config = self.run.checkpoint(trainer.step), replace(self.config, model=model.config)
        write = partial(save_checkpoint, folder, model=stored, vocab=self.corpus.vocab, config=config)
        self.writer.begin(partial(write, training=training, valid_loss=valid_loss, keep=trainer.config.keep))

    def _sample(self) -> None:
        model, config = self.trainer.whole_model(), self.config
        if not self.trainer.ranks.first:
            return
        sampling = Sampling(seed=config.train.seed)
        tokens, precision = config.train.sample_tokens, config.train.precision
        lengths = config.writing_lengths(config.eval_lengths)
        try:
            [sample] = generate(model, self.corpus.vocab, [""], lengths, sampling, tokens, precision=precision)
        except FloatingPointError as error:  # of a diverged model, about which the steps know more
            return self._say(f"No sample at step {self.trainer.step}: {error}")
        self._say(f"sample: {sample}")
        self._log(sample=sample)


def introduce(run: Run, model: TransformerXL, corpus: Corpus, config: RunConfig, ranks: Ranks) -> None:
    """Print and log the lines about a run that begins or goes on: its model, text, lengths and machine."""
    train, scored, split = config.train, config.eval_lengths, corpus.header.splits["train"]
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    ngrams = sum(size for name, size in sizes.items() if name.startswith("ngrams."))
    of_ngrams = f" ({ngrams / 1e6:.2f}M of n-grams and matches)" if ngrams else ""
    unknown = f" ({split.unknown:,} unknown)" if split.unknown else ""
    together = f", {ranks.size} ranks by {train.parallel}" if ranks.size > 1 else ""
    run.say(
        f"{sum(sizes.values()) / 1e6:.2f}M parameters{of_ngrams} on {corpus.name}, {split.tokens:,} tokens{unknown}, "
        f"{corpus.vocab}; segments of {train.tgt_len:,} after {train.mem_len:,}, scored {scored.tgt_len:,} after "
        f"{scored.mem_len:,}; {train.device}, {train.precision}, {train.backend}{together}; {run.path}"
    )
    if train.average_from >= train.max_steps:
        run.say(f"No weights are averaged: train.average_from = {train.average_from:,} is not before the last step.")
    last, step, most = run.latest, run.step, train.max_steps
    why = "" if last else run.facts()["why"]
    for line in filter(None, [why, *corpus.notes]):
        run.say(line)
    if last is not None:
        ended = f" All {most:,} steps are done; a higher train.max_steps goes on." if step >= most else ""
        run.say(f"Resumed from step {step:,} of {most:,} ({last.name}).{ended}")


def progress_text(unit: str, loss: float, lr: float, tokens_per_second: float, seconds_left: float | None) -> str:
    """The line of figures that training prints; `loss` is the mean of nats since the last line."""
    name, value = figure(unit, loss)
    shown = f"{value:8.2f}" if name == "ppl" else f"{value:.4f}"
    speed = f"{tokens_per_second:,.0f} tokens/s"
    return f"loss {loss:.4f}  {name} {shown}  lr {lr:.2e}  {speed}  {clock(seconds_left)} left"


@contextmanager
def _deferred_signals(ranks: Ranks) -> Iterator[list[str]]:
    """Collect SIGTERM, SIGINT and SIGHUP until a step is done. A second SIGTERM or SIGINT acts at once, except on one
    of several ranks, because their launcher ends them. A second SIGHUP does not, because a terminal that closes may
    send it twice and after SIGTERM; under nohup it stays ignored. Only the main thread gets signals."""
    received: list[str] = []
    numbers, hangup = [signal.SIGTERM, signal.SIGINT], getattr(signal, "SIGHUP", None)  # Windows has no SIGHUP
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        numbers.append(hangup)
    handlers = {number: signal.getsignal(number) for number in numbers if current_thread() is main_thread()}
    previous = {number: handler for number, handler in handlers.items() if handler is not None}  # None: not Python's

    def receive(number: int, _frame: object) -> None:
        received.append(signal.Signals(number).name)
        if ranks.size > 1 or number == hangup:
            return
        for other in previous.keys() - {hangup}:
            signal.signal(other, previous[other])
        if number == signal.SIGINT:
            with suppress(OSError):  # not by `print`, because the signal may interrupt a print
                os.write(2, b"\ntxl: Stopping after this step is saved. A second Ctrl-C ends at once.\n")

    for number in previous:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
