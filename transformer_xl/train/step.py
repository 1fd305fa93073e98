"""One step of training, and a model in training with where it stands.

All state lives in four places: weights, optimizer, memory, and `step`, from which the learning rate and the place in
the data follow; random numbers are PyTorch's own. `Trainer.state` is all of it, whichever rank holds it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..checkpoint import TrainingState, current_name, first_house_numbers, set_weights, weights
from ..config.settings import TrainConfig
from ..data.loader import Segment, StreamLoader
from ..evaluation.measures import figure, tokens_per_second
from ..mistake import Mistake
from ..model.baselines import build_model
from ..model.memory import Memory
from ..model.transformer_xl import TransformerXL, ordered_weights
from ..runtime.device import autocast
from ..runtime.ranks import Ranks
from .averaging import Average
from .diagnosis import not_finite
from .objective import Counts, Objective
from .optim import build_optimizers, set_rates
from .parallel import parallelise, part_as, unsynchronised, whole
from .writer import Snapshot

MOST_SKIPPED = 10
"""Steps in a row without a finite loss and gradient after which training gives up."""


class StepResult(NamedTuple):
    """What one step did, on all ranks: nats and number of its targets, gradient norm before clipping, signals."""

    nats: float
    targets: int
    grad_norm: float
    signals: int = 0

    @property
    def skipped(self) -> bool:
        return not (math.isfinite(self.grad_norm) and math.isfinite(self.nats))


def train_step(
    model: TransformerXL,
    optimizers: list[torch.optim.Optimizer],
    segment: Segment,
    memory: Memory,
    config: TrainConfig,
    step: int,
    *,
    objective: nn.Module | None = None,
    ranks: Ranks | None = None,
    signals: Sequence[object] = (),
) -> tuple[StepResult, Memory]:
    """One optimizer step over one segment of every stream, in `batch_chunk` chunks of rows.

    Gradients are those of the mean over all targets of the segment, whatever the number of chunks and ranks. A step
    whose loss or gradient is not finite changes nothing, and the memory it made is thrown away.

    Args:
        segment: of the whole batch.
        memory: of this rank's rows, as is the returned one.
        objective: what `parallelise` made of the model's `Objective`; None where this process is alone.
        signals: what this rank received so far; the result counts those of all ranks.
    """
    ranks, objective = ranks or Ranks(), objective or objective_of(model, config)
    device, mine = _device(model), ranks.rows(len(segment.ids))
    learned = trained(segment.targets, config.loss)
    ids, targets = segment.ids[mine].to(device), learned[mine].to(device)
    counts = Counts.of(learned >= 0, device)
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    left: list[Memory] = []
    model.zero_grad()
    for rows in _chunks(len(ids), config.batch_chunk):
        with unsynchronised(objective) if rows.stop < len(ids) else nullcontext():
            with autocast(config.precision, device):
                call = ids[rows], targets[rows], memory.select(rows), config.lengths
                loss, nll, after = objective(*call, counts=counts, progress=step / config.max_steps)
            (loss * ranks.size).backward()  # ranks take the mean of their gradients
        totals[0] += nll.detach().sum(dtype=torch.float64)
        left.append(after)
    totals[1] = whole(nn.utils.clip_grad_norm_(ordered_weights(model).values(), config.clip or math.inf))
    nats, norm = totals.tolist()  # the one time that the step waits for the device
    nats, stops = ranks.total([nats, len(signals)])
    result = StepResult(nats, int((learned >= 0).sum()), norm, int(stops))
    if result.skipped:
        return result, memory
    new = int((segment.targets >= 0).any(0).sum())
    set_rates(optimizers, step, config, share=new / config.tgt_len if config.random_tgt_len else 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return result, Memory.cat(left)


def objective_of(model: TransformerXL, config: TrainConfig) -> Objective:
    """What `config` trains."""
    return Objective(model, alpha=config.ar_alpha, beta=config.tar_beta)


def trained(targets: Int[Tensor, "B T"], loss: str) -> Int[Tensor, "B T"]:
    """The targets that `loss` trains on: all of them ("full"), or the recent half of each row's own ("half"), so that
    none is learned from a short context (Al-Rfou et al. 2019; Dai et al. 2019, section 4.3)."""
    if loss == "full":
        return targets
    scored = targets >= 0
    recent = scored.cumsum(1) > scored.sum(1, keepdim=True) // 2
    return targets.where(recent, -1)


def aligned(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy in memory that PyTorch allocated. A tensor read from a file may begin at any byte, and products of such a
    tensor round in another way on some CPUs."""
    return tensor.to(device, copy=True)


def _chunks(rows: int, count: int) -> list[slice]:
    size = rows // count
    return [slice(start, start + size) for start in range(0, rows, size)]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


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
    """A model in training and where it stands; of many ranks, each has one."""

    model: TransformerXL
    loader: StreamLoader
    """Of the whole batch."""
    config: TrainConfig
    step: int = 0
    seconds: float = 0.0
    skipped: int = 0
    """Steps skipped in a row."""
    pace: Pace = field(default_factory=Pace)
    average: Average[TransformerXL] | None = None
    """Of the weights after each step from `average_from` on."""
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        objective = objective_of(self.model, self.config)
        self.objective = parallelise(objective, self.config.parallel, self.ranks, compiled=self.config.compile)
        self.optimizers = build_optimizers(self.model, self.config)
        self.memory = self._empty_memory()

    def _empty_memory(self) -> Memory:
        return self.model.empty_memory(len(range(self.config.batch_size)[self._mine]), self.config.lengths)

    @property
    def _mine(self) -> slice:
        return self.ranks.rows(self.config.batch_size)

    @property
    def sharded(self) -> bool:
        """Whether each rank has but a part of the weights."""
        return self.ranks.size > 1 and self.config.parallel == "fsdp"

    def readable(self) -> TransformerXL:
        """The model to score and to write text with: itself, or, where its weights are sharded, a whole copy, which
        all ranks have to make."""
        if not self.sharded:
            return self.model
        device = _device(self.model)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            copy = build_model(self.model.config, backend=self.config.backend)
        set_weights(copy, {k: whole(v) for k, v in weights(self.model).items()}, "the sharded model")
        return copy.to(device).train()

    def advance(self, signals: Sequence[object] = ()) -> StepResult:
        """Take the next step; `signals` as in `train_step`.

        Raises:
            FloatingPointError: too many steps in a row had no finite loss and gradient.
        """
        start = time.perf_counter()
        segment = self.loader.segment(self.step)
        if segment.reset is not None:
            whole_batch = bool(segment.reset.all())
            self.memory = self._empty_memory() if whole_batch else self.memory.reset(segment.reset[self._mine])
        place: dict[str, Any] = {"objective": self.objective, "ranks": self.ranks, "signals": signals}
        before = self.memory
        result, self.memory = train_step(self.model, self.optimizers, segment, before, self.config, self.step, **place)
        self.skipped = self.skipped + 1 if result.skipped else 0
        self.step += 1
        if self.config.average_from and self.step > self.config.average_from and not result.skipped:
            self.average = self.average or Average(self.model)
            self.average.update(self.model)
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self.pace.add(result, seconds)
        if self.skipped >= MOST_SKIPPED:
            self._give_up(segment)
        return result

    def _give_up(self, segment: Segment) -> None:
        ids, targets = segment.ids[self._mine], trained(segment.targets, self.config.loss)[self._mine]
        parts = _chunks(len(ids), self.config.batch_chunk)
        chunks = [(ids[rows], targets[rows], self.memory.select(rows)) for rows in parts]
        progress = (self.step - 1) / self.config.max_steps
        where = not_finite(
            objective_of(self.model, self.config), chunks, self.memory, self.config, progress, self.ranks
        )
        raise FloatingPointError(
            f"{MOST_SKIPPED} steps in a row up to step {self.step} had no finite loss and gradient, so training "
            f"stopped; what is not finite appears first in {where}. Lower train.lr (now {self.config.lr}) or lengthen "
            "train.warmup_steps, and start from the last checkpoint, which is as it was, with --init."
        )

    def state(self, snapshot: Snapshot | None = None) -> TrainingState:
        """Everything resuming needs beyond the weights, of all ranks and as they are now: further steps leave it alone,
        the next state in the same `snapshot` takes its place. All ranks have to call this."""
        take = (snapshot or Snapshot()).take
        layers = (torch.cat(self.ranks.gather(layer)) for layer in self.memory.layers)
        tensors = {f"memory.{i}": layer.cpu() for i, layer in enumerate(layers)}
        if self.memory.valid is not None:
            tensors["memory.valid"] = torch.cat(self.ranks.gather(self.memory.valid)).cpu()
        scalars: dict[str, Any] = {"seconds": self.seconds, "skipped": self.skipped, "pace": asdict(self.pace)}
        owners: dict[Any, str] = {weight: name for name, weight in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for weight, values in optimizer.state.items():
                moments = {f"optimizer.{owners[weight]}.{name}": value for name, value in values.items()}
                tensors |= {key: take(key, value) for key, value in moments.items() if value is not None}
        if self.average is not None:  # whose weights are the checkpoint's
            scalars["averaged"] = self.average.count
            live = {f"live.{name}": weight for name, weight in self.model.named_parameters()}
            tensors |= {name: take(name, weight) for name, weight in live.items()}
        states = {"cpu": torch.get_rng_state()}
        if _device(self.model).type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(_device(self.model))
        for kind, own in states.items():
            tensors |= {f"random.{rank}.{kind}": state for rank, state in enumerate(self.ranks.gather(own))}
        return TrainingState(self.step, scalars, tensors)

    def restore(self, state: TrainingState) -> None:
        """Go on from `state`, whose checkpoint's weights the model has: with the same bits as if training had never
        stopped, or, where there were more or fewer ranks, with the same losses to rounding, but for dropout."""
        self.step, self.seconds, self.skipped = state.step, state.scalars["seconds"], state.scalars["skipped"]
        self.pace = Pace(**state.scalars["pace"])
        parts: dict[str, dict[str, Tensor]] = {"memory": {}, "optimizer": {}, "random": {}, "live": {}}
        for name, value in state.tensors.items():
            part, rest = name.split(".", 1)
            parts[part][rest] = value
        weights = dict(self.model.named_parameters())
        if parts["live"]:
            self.average = Average(self.model, state.scalars["averaged"])
            with torch.no_grad():
                for name, value in parts["live"].items():
                    weights[current_name(name, weights)].copy_(value)
        device = _device(self.model)
        held = {name: aligned(value[self._mine], device) for name, value in parts["memory"].items()}
        layers = tuple(held[str(i)] for i in range(len(self.memory.layers)))
        self.memory = self._empty_memory()._replace(layers=layers, valid=held.get("valid"))
        self._restore_optimizers(parts["optimizer"])
        self._restore_random(parts["random"])

    def _restore_optimizers(self, saved: dict[str, Tensor]) -> None:
        weights: dict[str, Tensor] = dict(self.model.named_parameters())
        numbered = first_house_numbers(self.optimizers, weights)
        moments: dict[Any, dict[str, Tensor]] = {}
        for place, value in saved.items():
            name, _, key = place.rpartition(".")
            weight = weights[numbered.get(name, name)]
            if value.ndim and value.shape != weight.shape:
                raise Mistake(f"The checkpoint's {key} of {name} has another shape than the weight. Use another.")
            part = part_as(value, weight)
            moments.setdefault(weight, {})[key] = aligned(part, part.device)
        for optimizer in self.optimizers:
            state = optimizer.state_dict()
            own = [p for group in optimizer.param_groups for p in group["params"]]
            state["state"] = {index: moments[weight] for index, weight in enumerate(own) if weight in moments}
            optimizer.load_state_dict(state)

    def _restore_random(self, saved: dict[str, Tensor]) -> None:
        if sum(name.endswith(".cpu") for name in saved) != self.ranks.size:
            torch.manual_seed((self.config.seed + 1_000_003 * self.step + self.ranks.rank) % 2**63)
            return
        torch.set_rng_state(saved[f"{self.ranks.rank}.cpu"])
        if (cuda := saved.get(f"{self.ranks.rank}.cuda")) is not None and _device(self.model).type == "cuda":
            torch.cuda.set_rng_state(cuda, _device(self.model))
