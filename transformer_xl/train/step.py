"""One step of training, and `Trainer`: a model in training with its state.

The state is the weights, the optimizer's moments, the memory, PyTorch's random numbers, and `step`, which determines
the learning rate and the position in the data. `Trainer.state` collects all but the weights, from all ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn

from ..config.settings import TrainConfig
from ..data.loader import Segment, StreamLoader
from ..evaluation.score import device_of, figure, ratio
from ..model.baselines import build_model
from ..model.memory import Memory
from ..model.transformer_xl import TransformerXL, ordered_weights
from ..run.checkpoint import TrainingState
from ..run.parts import set_weights, weights
from ..runtime.device import on_device, sums_on
from ..runtime.ranks import Ranks
from .compiled import compile_objective, compiled, is_usual
from .half import FIRST_SCALE, LossScale, unscale, zero_if_finite
from .objective import Counts, Objective
from .optim import NGRAM_TABLE, build_optimizers, set_rates
from .parallel import parallelise, part_as, whole, without_sync
from .replay import Replay, forward_backward
from .writer import BackgroundWriter

MOST_SKIPPED = 10
"""Training stops after this many steps in a row without a finite loss and gradient."""


class StepResult(NamedTuple):
    """The result of one step on all ranks."""

    nats: float
    targets: int
    grad_norm: float
    """The norm before clipping."""
    signals: int = 0
    scale: float = 1.0
    """The factor by which the loss was multiplied."""

    @property
    def skipped(self) -> bool:
        return not (math.isfinite(self.grad_norm) and math.isfinite(self.nats))

    @property
    def overflowed(self) -> bool:
        """Whether it was skipped because the scale was too large."""
        return self.skipped and math.isfinite(self.nats) and self.scale > 1


def average_of(model: nn.Module) -> AveragedModel:
    """The mean of the weights at each `update_parameters`, in a fifth of the time of PyTorch's default on a CPU."""
    return AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())


def train_step(
    model: TransformerXL,
    optimizers: list[torch.optim.Optimizer],
    segment: Segment,
    memory: Memory,
    config: TrainConfig,
    step: int,
    *,
    objective: nn.Module | None = None,
    run: Callable[..., tuple[Tensor, Memory]] = forward_backward,
    ranks: Ranks | None = None,
    signals: Sequence[object] = (),
    scale: float = 1.0,
) -> tuple[StepResult, Memory]:
    """Take one optimizer step on one segment of every stream, in `batch_chunk` chunks of rows.

    Gradients are of the mean loss over all targets of the segment, for any number of chunks and ranks. A step whose
    loss or gradient is not finite changes nothing and returns the memory that it was given.

    Args:
        segment: the segment of the whole batch.
        memory: the memory of this rank's rows.
        objective: the model's `Objective`, wrapped by `parallelise`; None if this process is alone.
        run: `forward_backward`, or a `Replay` of it.
        signals: the signals that this rank received so far; the result counts the signals of all ranks.
        scale: the loss is multiplied by this before backward, and the gradients are divided by it; see `LossScale`.
    """
    ranks, objective = ranks or Ranks(), objective or objective_of(model, config)
    device, mine = device_of(model), ranks.rows(len(segment.ids))
    learned = trained_targets(segment.targets, config.loss)
    ids, targets = on_device(segment.ids[mine], device), on_device(learned[mine], device)
    size = len(ids) // config.batch_chunk
    counts = Counts.of(learned >= 0, device)
    factor = torch.full((), scale, device=device)
    totals = torch.zeros(2, dtype=torch.float64, device=sums_on(device))
    left: list[Memory] = []
    model.zero_grad()
    for start in range(0, len(ids), size):
        rows = slice(start, start + size)
        with without_sync(objective) if rows.stop < len(ids) else nullcontext():
            call = ids[rows], targets[rows], memory.select(rows), config.lengths
            nll, after = run(objective, config.precision, factor, call, counts, step / config.max_steps)
        totals[0] += nll.to(totals.device).sum(dtype=torch.float64)
        left.append(after)
    # The ranks' gradients were averaged; this makes sums. In fp16 a loss times the ranks would overflow earlier.
    unscale((weight.grad for weight in model.parameters()), scale / ranks.size)
    clipped = [weight for name, weight in ordered_weights(model).items() if name != NGRAM_TABLE]
    totals[1] = whole(nn.utils.clip_grad_norm_(clipped, config.clip or math.inf))
    if config.precision == "fp16" and model.ngrams is not None:  # their gradient is not in the norm
        totals[1] += whole(zero_if_finite(model.ngrams.table.weight.grad)).to(totals.device)
    nats, norm = totals.tolist()  # without n-grams, the only time that the step waits for the device
    nats, stops = ranks.total([nats, len(signals)])
    result = StepResult(nats, int((learned >= 0).sum()), norm, int(stops), scale)
    if result.skipped:
        return result, memory
    new = int((segment.targets >= 0).any(0).sum())
    set_rates(optimizers, step, config, share=new / config.tgt_len if config.random_tgt_len else 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return result, Memory.cat(left)


def objective_of(model: TransformerXL, config: TrainConfig) -> Objective:
    """The objective that `config` describes."""
    return Objective(model, alpha=config.ar_alpha, beta=config.tar_beta)


def trained_targets(targets: Int[Tensor, "B T"], loss: str) -> Int[Tensor, "B T"]:
    """The targets that `loss` trains on: "full" keeps all, "half" keeps the later half of each row's targets, so that
    every target has a long context (Al-Rfou et al. 2019; Dai et al. 2019, section 4.2). The others become -1."""
    if loss == "full":
        return targets
    scored = targets >= 0
    recent = scored.cumsum(1) > scored.sum(1, keepdim=True) // 2
    return targets.where(recent, -1)


def _finite(tensor: Tensor) -> bool:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(own.isfinite().all())


@dataclass
class Pace:
    """Sums since the last line of progress. They are part of a run's state, so a resumed run prints the same lines."""

    nats: float = 0.0
    targets: int = 0
    grad_norm: float = 0.0
    """The sum over the steps that were not skipped."""
    steps: int = 0
    skipped: int = 0
    overflows: int = 0
    seconds: float = 0.0

    def add(self, result: StepResult, seconds: float) -> None:
        self.seconds += seconds
        if result.skipped:
            self.overflows += result.overflowed
            self.skipped += not result.overflowed
            return
        self.nats += result.nats
        self.targets += result.targets
        self.grad_norm += result.grad_norm
        self.steps += 1

    def entry(self, unit: str) -> dict[str, float]:
        """Averages for the metrics file."""
        loss = ratio(self.nats, self.targets)
        name, value = figure(unit, loss)
        norm, speed = ratio(self.grad_norm, self.steps), ratio(self.targets, self.seconds)
        skipped = {"skipped": self.skipped, "overflows": self.overflows}
        return {"loss": loss, name: value, "grad_norm": norm, **skipped, "tokens_per_second": speed}


@dataclass
class Trainer:
    """A model in training with its state. Each rank has one."""

    model: TransformerXL
    loader: StreamLoader
    """Gives segments of the whole batch."""
    config: TrainConfig
    step: int = 0
    seconds: float = 0.0
    skipped: int = 0
    """Number of steps skipped in a row, without those that overflowed."""
    pace: Pace = field(default_factory=Pace)
    average: AveragedModel | None = None
    """The mean of the weights after each step from `average_from` on (Polyak & Juditsky 1992; Merity et al. 2018)."""
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        if self.model.ngrams is not None:  # NCCL does not add sparse gradients
            kind = device_of(self.model).type  # Apple's GPU has no sparse gradients
            self.model.ngrams.table.sparse = kind == "cpu" or (kind == "cuda" and self.ranks.size == 1)
        objective = objective_of(self.model, self.config)
        if self.config.compile:
            compile_objective(objective, self.config)
        self.objective: nn.Module = parallelise(objective, self.config.parallel, self.ranks)
        self.run: Callable[..., tuple[Tensor, Memory]] = Replay() if self.config.cuda_graph else forward_backward
        self.scale: LossScale = LossScale(FIRST_SCALE if self.config.precision == "fp16" else 1.0)
        self.optimizers: list[torch.optim.Optimizer] = build_optimizers(self.model, self.config)
        self.short_loader: StreamLoader = self.loader.short() if self.config.short_share else self.loader
        self.memory: Memory = self._empty_memory(self.config.at(0))

    def _empty_memory(self, config: TrainConfig) -> Memory:
        mine = self.ranks.rows(config.batch_size)
        return self.model.empty_memory(mine.stop - mine.start, config.lengths)

    def whole_model(self) -> TransformerXL:
        """The model for evaluation and generation: the model itself, or a whole copy of a sharded one. All ranks have
        to call this."""
        if self.ranks.size == 1 or self.config.parallel == "ddp":
            return self.model
        device = device_of(self.model)
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
        config = self.config.at(self.step)
        segment = (self.loader if config is self.config else self.short_loader).segment(self.step)
        mine = self.ranks.rows(config.batch_size)
        fits = len(self.memory.layers[0]) == mine.stop - mine.start
        if not fits or (segment.reset is not None and segment.reset.all()):
            self.memory = self._empty_memory(config)
        elif segment.reset is not None:
            self.memory = self.memory.reset(segment.reset[mine])
        usual = is_usual(segment, self.memory, config, self.model.config)
        with compiled(usual=usual) if config.compile else nullcontext():
            result, self.memory = train_step(
                self.model,
                self.optimizers,
                segment,
                self.memory,
                config,
                self.step,
                objective=self.objective,
                run=self.run if usual else forward_backward,
                ranks=self.ranks,
                signals=signals,
                scale=self.scale.value,
            )
        if self.config.precision == "fp16" and (result.overflowed or not result.skipped):
            self.scale.update(result.overflowed)
        if not result.overflowed:
            self.skipped = self.skipped + 1 if result.skipped else 0
        self.step += 1
        if self.config.average_from and self.step > self.config.average_from and not result.skipped:
            self.average = self.average or average_of(self.model)
            self.average.update_parameters(self.model)
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self.pace.add(result, seconds)
        if self.skipped >= MOST_SKIPPED:
            raise FloatingPointError(
                f"{MOST_SKIPPED} steps in a row up to step {self.step} had no finite loss and gradient, so training "
                f"stopped. The first nan or infinity is in {self._first_fault(result)}. Lower train.lr (now "
                f"{self.config.lr}) or lengthen train.warmup_steps, and start again, or from the last checkpoint if "
                "there is one, which has not changed, with --init."
            )
        return result

    def _first_fault(self, result: StepResult) -> str:
        """The source of a skipped step's nan or infinity, as far as this rank sees it."""
        found = [f"the weight {name}" for name, weight in self.model.named_parameters() if not _finite(weight)]
        found += [f"the memory of layer {i}" for i, layer in enumerate(self.memory.layers) if not _finite(layer)]
        return [*found, "a gradient" if math.isfinite(result.nats) else "the loss"][0]

    def state(self, writer: BackgroundWriter | None = None) -> TrainingState:
        """A copy of everything that resuming needs beyond the weights, from all ranks. The next call with the same
        `writer` overwrites it. All ranks have to call this."""
        copy = (writer or BackgroundWriter()).copy
        scalars: dict[str, Any] = {"seconds": self.seconds, "skipped": self.skipped, "pace": asdict(self.pace)}
        scalars["scale"] = asdict(self.scale)
        tensors: dict[str, Tensor] = {}
        layers = {str(i): layer for i, layer in enumerate(self.memory.layers)}
        for name, part in {**layers, "valid": self.memory.valid, "tokens": self.memory.tokens}.items():
            if part is not None:
                tensors[f"memory.{name}"] = torch.cat(self.ranks.gather(part)).cpu()
        moments = {weight: kinds for optimizer in self.optimizers for weight, kinds in optimizer.state.items()}
        for name, weight in self.model.named_parameters():
            state = {f"optimizer.{name}.{kind}": value for kind, value in moments.get(weight, {}).items()}
            if self.average is not None:  # the checkpoint's weights are the average
                state[f"live.{name}"] = weight
                scalars["averaged"] = int(self.average.n_averaged)
            tensors |= {key: copy(key, value) for key, value in state.items() if value is not None}
        states = {"cpu": torch.get_rng_state()}
        if device_of(self.model).type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(device_of(self.model))
        elif device_of(self.model).type == "mps":
            states["mps"] = torch.mps.get_rng_state()
        for kind, own in states.items():
            tensors |= {f"random.{rank}.{kind}": state for rank, state in enumerate(self.ranks.gather(own))}
        return TrainingState(self.step, scalars, tensors)

    @torch.no_grad()
    def restore(self, state: TrainingState) -> None:
        """Continue from `state`; the model has the weights of its checkpoint already.

        Training continues with the same bits as if it had never stopped. After a change of the number of ranks, losses
        agree to rounding, except for dropout.
        """
        self.step, self.seconds, self.skipped = state.step, state.scalars["seconds"], state.scalars["skipped"]
        self.pace = Pace(**state.scalars["pace"])
        if self.config.precision == "fp16":
            self.scale = LossScale(**state.scalars["scale"])
        if "averaged" in state.scalars:
            self.average = average_of(self.model)
            self.average.n_averaged.fill_(state.scalars["averaged"])
        weights: dict[str, Tensor] = dict(self.model.named_parameters())
        moments: dict[Tensor, dict[str, Tensor]] = {weight: {} for weight in weights.values()}
        memory: dict[str, Tensor] = {}
        # Copies, because a tensor read from a file may begin at any byte of memory, and on some CPUs products of an
        # unaligned tensor round differently.
        for entry, value in state.tensors.items():
            kind, _, name = entry.partition(".")
            if kind == "memory":
                memory[name] = value[self.ranks.rows(len(value))].to(device_of(self.model), copy=True)
            elif kind == "live":
                weights[name].copy_(value)
            elif kind == "optimizer":
                name, _, moment = name.rpartition(".")
                moments[weights[name]][moment] = part_as(value, weights[name]).clone()
        layers = tuple(memory[str(i)] for i in range(len(self.memory.layers)))
        self.memory = Memory(layers, memory.get("valid"), self.memory.zero_filled, memory.get("tokens"))
        for optimizer in self.optimizers:
            saved = optimizer.state_dict()
            own = [weight for group in optimizer.param_groups for weight in group["params"]]
            saved["state"] = {index: moments[weight] for index, weight in enumerate(own) if moments[weight]}
            optimizer.load_state_dict(saved)
        self._restore_random({name: value for name, value in state.tensors.items() if name.startswith("random.")})

    def _restore_random(self, saved: dict[str, Tensor]) -> None:
        if sum(name.endswith(".cpu") for name in saved) != self.ranks.size:
            torch.manual_seed((self.config.seed + 1_000_003 * self.step + self.ranks.rank) % 2**63)
            return
        torch.set_rng_state(saved[f"random.{self.ranks.rank}.cpu"])
        if (cuda := saved.get(f"random.{self.ranks.rank}.cuda")) is not None and device_of(self.model).type == "cuda":
            torch.cuda.set_rng_state(cuda, device_of(self.model))
        if (mps := saved.get(f"random.{self.ranks.rank}.mps")) is not None and device_of(self.model).type == "mps":
            torch.mps.set_rng_state(mps)
