"""Runs and their checkpoints: `Run` is the folder of a run.

A checkpoint is a folder of safetensors and JSON. It contains no pickles, and exists only if it is complete.

    runs/NAME/checkpoints/step_00004000/
        model.safetensors     the weights; tied ones once, under the first of their names in `model.state_dict()`
        config.json           format, step, validation loss if known, and every setting of the run
        vocab.json            the vocabulary
        training.safetensors  the tensors of the training state (optimizer, memory, random numbers), for resuming
        training.json         the scalars of the training state
        SHA256SUMS            checksums, compared when a file is read; `sha256sum --check` reads them too

A folder without the last three files is enough for evaluating and generating.
"""

from __future__ import annotations

from .checkpoint import (
    LoadedModel,
    TrainingState,
    config_of,
    load_config,
    load_model,
    load_training,
    load_vocab,
    load_weights,
    save_checkpoint,
)
from .folder import Run, environment, find_checkpoint, short_names, valid_loss
from .metrics import Metrics
from .parts import EXPORTED_VOCAB, dimensions, set_weights, weights, write_json

__all__ = [
    "EXPORTED_VOCAB",
    "LoadedModel",
    "Metrics",
    "Run",
    "TrainingState",
    "config_of",
    "dimensions",
    "environment",
    "find_checkpoint",
    "load_config",
    "load_model",
    "load_training",
    "load_vocab",
    "load_weights",
    "save_checkpoint",
    "set_weights",
    "short_names",
    "valid_loss",
    "weights",
    "write_json",
]
