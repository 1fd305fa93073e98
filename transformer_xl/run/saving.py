"""Write a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..config.settings import RunConfig
from ..data.vocab import Vocab
from ..model.baselines import check_rebuilt
from ..model.transformer_xl import TransformerXL
from ..runtime.files import remove_unfinished, seal, whole_folder
from .folder import Run
from .parts import FORMAT, VERSION, weights, write_json, write_tensors


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
    step: int | None = None,
    valid_loss: float | None = None,
    keep: int | None = None,
    report: Sequence[str] = (),
) -> Path:
    """Write a complete checkpoint. After an error nothing of it remains, and older checkpoints are unchanged.

    Args:
        folder: the folder to write; `Run.checkpoint` names those of a run.
        model: a `TransformerXL`, whose config is stored as `config.model`; or its `weights`.
        training: the state for resuming; None if the checkpoint is not for resuming.
        step: number of training steps of the weights; by default the one in `training`.
        valid_loss: mean nats per target on the validation split after this step; `best` compares it.
        keep: afterwards keep only the last `keep` checkpoints of the run and the best one; None keeps all.
        report: sentences about the origin of the weights.

    Raises:
        OSError: a sentence with the reason, for instance a full disk.
        Mistake: the checkpoint would be loaded as another model; see `register`.
    """
    folder = Path(folder)
    if isinstance(model, nn.Module):
        check_rebuilt(model)
    if step is None:
        step = training.step if training else 0
    known_loss = valid_loss if valid_loss is not None and math.isfinite(valid_loss) else None
    sections = asdict(replace(config, model=getattr(model, "config", config.model)))
    remove_unfinished(folder.parent)
    with whole_folder(folder) as unfinished:
        write_tensors(unfinished / "model.safetensors", weights(model) if isinstance(model, nn.Module) else model)
        header = {"format": FORMAT, "version": VERSION, "step": step, "valid_loss": known_loss}
        write_json(unfinished / "config.json", header | ({"report": list(report)} if report else {}) | sections)
        write_json(unfinished / "vocab.json", vocab.to_json())
        if training is not None:
            write_tensors(unfinished / "training.safetensors", training.tensors)
            write_json(unfinished / "training.json", {"step": training.step, "scalars": training.scalars})
        seal(unfinished)
    if keep is not None:
        Run.of(folder).prune(keep)
    return folder
