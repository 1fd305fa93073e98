"""Write a checkpoint, and read its model, settings, vocabulary and training state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config.recipe import SECTIONS, run_of, settings_of
from ..config.settings import RunConfig
from ..data.vocab import Vocab
from ..mistake import Mistake
from ..model.baselines import Undrawn, build_model, check_rebuilt, count_parameters
from ..model.transformer_xl import TransformerXL
from ..runtime.files import remove_unfinished, seal, whole_folder
from . import parts
from .folder import Run, find_checkpoint
from .metrics import finite


@dataclass(frozen=True)
class TrainingState:
    """The state for resuming, besides the weights: JSON scalars and named tensors."""

    step: int
    scalars: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def save_checkpoint(
    folder: str | Path,
    *,
    model: TransformerXL | Mapping[str, Tensor],
    vocab: Vocab,
    config: RunConfig,
    training: TrainingState | None = None,
    step: int = 0,
    valid_loss: float | None = None,
    keep: int | None = None,
    report: Sequence[str] = (),
) -> Path:
    """Write a complete checkpoint. After an error nothing of it remains, and older checkpoints are unchanged.

    Args:
        folder: the folder to write; `Run.checkpoint` names those of a run.
        model: a `TransformerXL`, whose config is stored as `config.model`, or the result of `weights(model)`.
        training: the state for resuming; None if the checkpoint is not for resuming.
        step: number of training steps of the weights; `training` has its own.
        valid_loss: mean nats per target on the validation split after this step; `Run.best` compares it.
        keep: afterwards keep only the last `keep` checkpoints of the run and the best one; None keeps all.
        report: sentences about the origin of the weights.

    Raises:
        OSError: it cannot be written, for instance because the disk is full.
        Mistake: the model's classes are not those of its kind; see `register`.
    """
    folder = Path(folder)
    if isinstance(model, nn.Module):
        check_rebuilt(model)
        model, config = parts.weights(model), replace(config, model=model.config)
    step = training.step if training else step
    header = {"format": parts.FORMAT, "version": parts.VERSION, "step": step, "valid_loss": finite(valid_loss)}
    header |= {"report": list(report)} if report else {}
    with whole_folder(folder) as unfinished:
        parts.write_tensors(unfinished / "model.safetensors", model)
        parts.write_json(unfinished / "config.json", header | asdict(config))
        parts.write_json(unfinished / "vocab.json", vocab.to_json())
        if training is not None:
            parts.write_tensors(unfinished / "training.safetensors", training.tensors)
            parts.write_json(unfinished / "training.json", {"step": training.step, "scalars": training.scalars})
        seal(unfinished)
    remove_unfinished(folder.parent, folder.name)  # not before: one of them may be the last whole copy
    if keep is not None:
        Run.of(folder).prune(keep)
    return folder


class LoadedModel(NamedTuple):
    """A trained model in eval mode, its vocabulary, and the settings of its run."""

    model: TransformerXL
    vocab: Vocab
    config: RunConfig


def load_model(path: str | Path, *, device: str | torch.device = "cpu", backend: str = "auto") -> LoadedModel:
    """Load a model from a local folder. `transformer_xl.load_model` also accepts names on the hub."""
    folder = find_checkpoint(path)
    config = load_config(folder)
    vocab = load_vocab(folder)
    if len(vocab) != config.model.vocab_size:
        raise Mistake(
            f"{folder} does not fit together: vocab.json has {len(vocab)} tokens and config.json says "
            f"model.vocab_size = {config.model.vocab_size}. Restore the folder from a copy."
        )
    _refuse_absurd(config, folder)
    with torch.random.fork_rng(devices=[]), Undrawn():  # a class of your own may draw: keep the caller's random state
        model = build_model(config.model, backend=backend)
    load_weights(model, folder)
    return LoadedModel(model.to(device).eval(), vocab, config)


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Copy a checkpoint's weights into `model`. Its device, dtype and ties do not change.

    Raises:
        ValueError: lists every missing, unexpected and wrong-shaped tensor. Then nothing is copied.
    """
    path = find_checkpoint(folder) / "model.safetensors"
    parts.set_weights(model, parts.read_tensors(path), str(path))


def load_training(folder: str | Path) -> TrainingState:
    """The training state of a checkpoint, with its tensors on the CPU.

    Raises:
        FileNotFoundError: the checkpoint has no training state.
    """
    folder = find_checkpoint(folder, which="last")
    if not (folder / "training.json").exists():
        raise FileNotFoundError(
            f"{folder} holds no training state, so training cannot resume there. Start a new run from it with --init."
        )
    parts.read_header(folder)  # refuses other versions
    stored = parts.read_json(folder / "training.json")
    own = f"step_{stored['step']:08d}"
    if folder.name.startswith("step_") and folder.name != own:  # a run reads its step in the name
        raise Mistake(f"{folder} must have the name {own}, because it is of that step. Rename it.")
    return TrainingState(stored["step"], stored["scalars"], parts.read_tensors(folder / "training.safetensors"))


def _refuse_absurd(config: RunConfig, folder: Path) -> None:
    """Refuse settings that need more than the file of weights holds, before memory is taken."""
    path, model = folder / "model.safetensors", config.model
    with parts.name_damage(path):  # it may be missing
        size = path.stat().st_size
    needed = model.n_layer * min(model.d_model, model.d_inner)  # less than they hold: to build many layers takes time
    if needed <= size:
        needed = count_parameters(model)
    if needed > size:  # of weights, and of bytes: a weight takes two or more
        with parts.name_damage(path):
            raise Mistake("config.json has sizes of more weights")


def load_config(folder: str | Path) -> RunConfig:
    """The settings in a checkpoint's `config.json`, as `config_of` reads them."""
    return config_of(parts.read_header(Path(folder)), Path(folder) / "config.json")


def config_of(stored: Mapping[str, object], path: Path) -> RunConfig:
    """The settings in `stored`, one table per section; missing settings have their defaults. Errors name `path`.

    Raises:
        ValueError: it has settings that this version does not have, or values that do not fit each other.
    """
    settings = settings_of({section: stored.get(section, {}) for section in SECTIONS})
    try:
        return run_of(settings, [])
    except Mistake as error:
        reasons = " ".join(str(error).splitlines())
        raise Mistake(f"{path}: {reasons} Update transformer-xl, or restore the file from a copy.") from error


def load_vocab(folder: str | Path) -> Vocab:
    """The vocabulary in a checkpoint's `vocab.json`."""
    path = Path(folder) / "vocab.json"
    stored = parts.read_json(path)
    try:
        return Vocab.from_json(stored)
    except ValueError as error:
        raise Mistake(f"{path} is no vocabulary: {error}") from error
