"""Training: one step as a function, and the loop around it that measures, saves and can be resumed.

All state lives in four places: weights, optimizer, memory, and `step`, from which the learning rate and the place in
the data follow; random numbers are PyTorch's own. `Trainer.state` is all of it.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from . import checkpoint
from .averaging import Average
from .data.corpus import Corpus
from .data.datasets import tokenised
from .data.detokenise import readable
from .data.loader import LineShuffle, Segment, StreamLoader
from .device import autocast
from .evaluate import EvalResult, evaluate
from .generate import Sampling, generate
from .memory import Memory
from .metrics import MetricLog, Progress, ProgressPrinter, figure, seconds_left, tokens_per_second
from .model import TransformerXL
from .optim import build_optimizers, learning_rate, set_rates
from .settings import RunConfig, TrainConfig
from .trackers import Trackers

MOST_SKIPPED = 10
"""Steps in a row without a finite gradient after which training gives up."""


class StepResult(NamedTuple):
    """What one step did: nats and number of its targets, gradient norm before clipping; not finite: step skipped."""

    nats: float
    targets: int
    grad_norm: float

    @property
    def skipped(self) -> bool:
        return not math.isfinite(self.grad_norm)


def train_step(
    model: TransformerXL,
    optimizers: list[torch.optim.Optimizer],
    segment: Segment,
    memory: Memory,
    config: TrainConfig,
    step: int,
) -> tuple[StepResult, Memory]:
    """One optimizer step over one segment of every stream, in `batch_chunk` chunks of rows.

    Gradients are those of the mean over all targets of the segment, however it is chunked. A step whose gradient is not
    finite changes nothing, and the memory it made is thrown away.
    """
    device = next(model.parameters()).device
    learned = trained(segment.targets, config.loss)
    ids, targets = segment.ids.to(device), learned.to(device)
    scored = (targets >= 0).sum().clamp(min=1)
    nats = torch.zeros((), dtype=torch.float64, device=device)
    left: list[Memory] = []
    objective = model.objective
    if config.ar_alpha or config.tar_beta:
        objective = partial(model.regularised, alpha=config.ar_alpha, beta=config.tar_beta)
    model.zero_grad()
    for rows in _chunks(len(ids), config.batch_chunk):
        with autocast(config.precision, device):
            loss, nll, after = objective(ids[rows], targets[rows], memory.select(rows), config.lengths)
        (loss * ((targets[rows] >= 0).sum() / scored)).backward()
        nats += nll.detach().sum(dtype=torch.float64)
        left.append(after)
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf).item()
    result = StepResult(nats.item(), int((learned >= 0).sum()), norm)
    if result.skipped:
        return result, memory
    new = int((segment.targets >= 0).any(0).sum())
    set_rates(optimizers, step, config, share=new / config.tgt_len if config.random_tgt_len else 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return result, Memory.cat(left)


def trained(targets: Int[Tensor, "B T"], loss: str) -> Int[Tensor, "B T"]:
    """The targets that `loss` trains on: all of them ("full"), or those of the recent half of the segment ("half"), so
    that none is learned from a short context (Al-Rfou et al. 2019; Dai et al. 2019, section 4.3). What a row reads anew
    is no part of the segment's halves."""
    if loss == "full":
        return targets
    again = (targets >= 0).int().argmax(1, keepdim=True)
    recent = torch.arange(targets.shape[1]) >= again + (targets.shape[1] - again) // 2
    return targets.where(recent, -1)


def _chunks(rows: int, count: int) -> list[slice]:
    size = rows // count
    return [slice(start, start + size) for start in range(0, rows, size)]


@dataclass
class Pace:
    """What happened since the last line of progress; part of a run's state, so that lines do not depend on stops."""

    nats: float = 0.0
    targets: int = 0
    grad_norm: float = 0.0
    """Summed over the steps taken."""
    steps: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def add(self, result: StepResult, seconds: float) -> None:
        self.seconds += seconds
        if result.skipped:
            self.skipped += 1
            return
        self.nats += result.nats
        self.targets += result.targets
        self.grad_norm += result.grad_norm
        self.steps += 1

    def entry(self, unit: str) -> dict[str, Any]:
        """Figures of the steps taken, for the metrics file."""
        loss = self.nats / self.targets if self.targets else math.nan
        name, value = figure(unit, loss)
        norm = self.grad_norm / self.steps if self.steps else math.nan
        speed = tokens_per_second(self.targets, self.seconds)
        return {"loss": loss, name: value, "grad_norm": norm, "skipped": self.skipped, "tokens_per_second": speed}


@dataclass
class Trainer:
    """A model in training and where it stands."""

    model: TransformerXL
    loader: StreamLoader
    config: TrainConfig
    step: int = 0
    seconds: float = 0.0
    skipped: int = 0
    """Steps skipped in a row."""
    pace: Pace = field(default_factory=Pace)
    average: Average[TransformerXL] | None = None
    """Of the weights after each step from `average_from` on."""

    @property
    def result(self) -> TransformerXL:
        """The model to score and to save."""
        return self.model if self.average is None else self.average.model

    def __post_init__(self) -> None:
        self.optimizers = build_optimizers(self.model, self.config)
        self.memory = self.model.empty_memory(self.config.batch_size)

    def advance(self) -> StepResult:
        """Take the next step.

        Raises:
            FloatingPointError: too many steps in a row had no finite gradient.
        """
        start = time.perf_counter()
        segment = self.loader.segment(self.step)
        if segment.reset is not None:
            fresh = self.model.empty_memory(self.config.batch_size)
            self.memory = fresh if segment.reset.all() else self.memory.reset(segment.reset)
        self.model.progress = self.step / self.config.max_steps
        result, self.memory = train_step(self.model, self.optimizers, segment, self.memory, self.config, self.step)
        self.skipped = self.skipped + 1 if result.skipped else 0
        self.step += 1
        if self.config.average_from and self.step > self.config.average_from and not result.skipped:
            self.average = self.average or Average(self.model)
            self.average.update(self.model)
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self.pace.add(result, seconds)
        if self.skipped >= MOST_SKIPPED:
            raise FloatingPointError(
                f"{MOST_SKIPPED} steps in a row up to step {self.step} had no finite gradient, so training stopped. "
                f"Lower train.lr (now {self.config.lr}) or lengthen train.warmup_steps, and start from the last "
                "checkpoint with --init."
            )
        return result

    def state(self) -> checkpoint.TrainingState:
        """Everything resuming needs beyond the weights."""
        tensors = {f"memory.{name}": value for name, value in _named_memory(self.memory)}
        scalars: dict[str, Any] = {"seconds": self.seconds, "skipped": self.skipped, "pace": asdict(self.pace)}
        for which, optimizer in enumerate(self.optimizers):
            for index, values in optimizer.state_dict()["state"].items():
                named = {name: value for name, value in values.items() if value is not None}
                tensors |= {f"optimizer.{which}.{index}.{name}": value for name, value in named.items()}
        if self.average is not None:  # whose weights are the checkpoint's
            scalars["averaged"] = self.average.count
            tensors |= {f"live.{name}": weight for name, weight in self.model.named_parameters()}
        tensors["random.cpu"] = torch.get_rng_state()
        if self._device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self._device)
        return checkpoint.TrainingState(self.step, scalars, tensors)

    def restore(self, state: checkpoint.TrainingState) -> None:
        """Go on from `state` with the same bits as if training had never stopped; weights are the checkpoint's."""
        self.step, self.seconds, self.skipped = state.step, state.scalars["seconds"], state.scalars["skipped"]
        self.pace = Pace(**state.scalars["pace"])
        parts: dict[str, dict[str, Tensor]] = {"memory": {}, "optimizer": {}, "random": {}, "live": {}}
        for name, value in state.tensors.items():
            part, rest = name.split(".", 1)
            parts[part][rest] = value
        if parts["live"]:
            self.average = Average(self.model, state.scalars["averaged"])
            with torch.no_grad():
                for name, weight in self.model.named_parameters():
                    weight.copy_(parts["live"][name])
        layers = [parts["memory"][str(i)].to(self._device) for i in range(len(self.memory.layers))]
        valid = parts["memory"].get("valid")
        self.memory = Memory(tuple(layers), None if valid is None else valid.to(self._device))
        for which, optimizer in enumerate(self.optimizers):
            values: dict[int, dict[str, Tensor]] = {}
            for name, value in parts["optimizer"].items():
                owner, index, key = name.split(".")
                if int(owner) == which:
                    values.setdefault(int(index), {})[key] = value
            optimizer.load_state_dict({**optimizer.state_dict(), "state": values})
        torch.set_rng_state(parts["random"]["cpu"])
        if self._device.type == "cuda" and "cuda" in parts["random"]:
            torch.cuda.set_rng_state(parts["random"]["cuda"], self._device)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def _named_memory(memory: Memory) -> Iterator[tuple[str, Tensor]]:
    yield from ((str(i), layer) for i, layer in enumerate(memory.layers))
    if memory.valid is not None:
        yield "valid", memory.valid


def fit(
    model: TransformerXL,
    corpus: Corpus,
    config: RunConfig,
    run: Path,
    *,
    resume: bool = False,
    trackers: Trackers | None = None,
) -> bool:
    """Train `model` on `corpus` as `config.train` says, and leave checkpoints and metrics in the folder `run`.

    Device, precision and backend must be settled, not "auto". With `resume` training goes on from the last checkpoint.

    Args:
        trackers: where figures and samples go besides `metrics.jsonl`; nowhere if None, whatever `config` names.

    Returns:
        False if SIGTERM or SIGINT ended it early, after the step was done and saved.

    Raises:
        FloatingPointError: too many steps in a row had no finite gradient.
    """
    settings = config.train
    run.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(settings.seed)
    model.to(settings.device).train()
    shuffle = None
    if config.corpus.shuffle_lines:
        assert corpus.vocab.line_end is not None, "a corpus whose lines are shuffled has line ends"
        shuffle = LineShuffle(corpus.vocab.line_end, settings.seed)
    loader = StreamLoader(
        corpus.split("train"),
        batch_size=settings.batch_size,
        tgt_len=settings.tgt_len,
        shuffle=shuffle,
        context_len=settings.context_len,
        random_seed=settings.seed if settings.random_tgt_len else None,
    )
    trainer = Trainer(model, loader, settings)
    metrics = MetricLog(run / "metrics.jsonl")
    last = checkpoint.latest(run) if resume else None
    if last is not None:
        checkpoint.load_weights(model, last)
        trainer.restore(checkpoint.load_training(last))
    metrics.truncate(trainer.step)
    if settings.compile:
        model.compile()
    with (
        ProgressPrinter(settings.max_steps, corpus.unit, step=trainer.step, log=run / "log.txt") as printer,
        _deferred_signals() as received,
    ):
        return _loop(trainer, corpus, config, run, metrics, trackers or Trackers(), printer, received)


def _loop(trainer: Trainer, corpus, config, run, metrics, trackers, printer, received) -> bool:
    def log(entry: dict[str, Any]) -> None:
        metrics.log(entry)
        trackers.log(entry)

    settings = config.train
    while trainer.step < settings.max_steps and not received:
        trainer.advance()
        printer.advance(trainer.step)
        last = trainer.step == settings.max_steps
        if last or _due(trainer.step, settings.log_every):
            log(_tell(trainer, corpus.unit, printer))
        if _due(trainer.step, settings.sample_every):
            sample = _sample(trainer.model, corpus, config)
            printer.note(f"sample: {sample}")
            trackers.note(sample, trainer.step)
        valid_loss = None
        if last or _due(trainer.step, settings.eval_every):
            models = {"valid": trainer.model} | ({} if trainer.average is None else {"valid-average": trainer.result})
            for split, model in models.items():
                result = validate(model, corpus, config)
                valid_loss = result.loss
                printer.note(f"step {trainer.step}  {split}  {result}{' (partial)' if corpus.caveat else ''}")
                log({"step": trainer.step, "split": split, **corpus.about, **result.to_json()})
        if valid_loss is not None or received or _due(trainer.step, settings.save_every):
            _save(trainer, corpus, config, run, valid_loss)
    return trainer.step >= settings.max_steps


def _tell(trainer: Trainer, unit: str, printer: ProgressPrinter) -> dict[str, Any]:
    """Show a line for people, and return one for machines; counting starts anew."""
    entry, trainer.pace = trainer.pace.entry(unit), Pace()
    lr, most = learning_rate(trainer.step - 1, trainer.config), trainer.config.max_steps
    progress = Progress(
        step=trainer.step,
        max_steps=most,
        loss=entry["loss"],
        lr=lr,
        tokens_per_second=entry["tokens_per_second"],
        seconds_left=seconds_left(trainer.step, most, trainer.seconds),
    )
    printer.show(progress)
    return {"step": trainer.step, "split": "train", **entry, "lr": lr, "seconds": trainer.seconds}


def validate(model: TransformerXL, corpus: Corpus, config: RunConfig) -> EvalResult:
    """The validation split, under the recipe's test lengths."""
    lengths = config.eval_lengths
    loader = StreamLoader(
        corpus.split("valid"),
        batch_size=config.eval.batch_size,
        tgt_len=lengths.tgt_len,
        max_tokens=config.train.eval_tokens,
        context_len=config.context_len(lengths),
    )
    sizes = corpus.vocab.symbol_bytes()
    return evaluate(model, loader, lengths, precision=config.train.precision, unit=corpus.unit, symbol_bytes=sizes)


def _save(trainer: Trainer, corpus: Corpus, config: RunConfig, run: Path, valid_loss: float | None) -> None:
    checkpoint.save_checkpoint(
        checkpoint.step_folder(run, trainer.step),
        model=trainer.result,
        vocab=corpus.vocab,
        config=config,
        training=trainer.state(),
        valid_loss=valid_loss,
        keep=config.train.keep,
    )


def _sample(model: TransformerXL, corpus: Corpus, config: RunConfig) -> str:
    sampling = Sampling(seed=config.train.seed)
    tokens, precision = config.train.sample_tokens, config.train.precision
    lengths = config.writing(config.eval_lengths)
    [text] = generate(model, corpus.vocab, [""], lengths, sampling, tokens, precision=precision)
    return readable(text) if tokenised(config.corpus.name) else text


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _deferred_signals() -> Iterator[list[str]]:
    """Collect SIGTERM and SIGINT until a step is done; a second one acts at once. Only the main thread gets signals."""
    received: list[str] = []
    previous: dict[int, Any] = {}

    def receive(number: int, _frame: Any) -> None:
        received.append(signal.Signals(number).name)
        signal.signal(number, previous[number])

    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, receive)
    except ValueError:  # not the main thread
        pass
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
