"""Checkpoints: folders of safetensors and JSON. They contain no pickles, and exist only if they are complete.

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

from .history import best, checkpoints, find_checkpoint, latest, put_damaged_aside, step_folder, valid_loss
from .loading import LoadedModel, config_of, load_config, load_model, load_training, load_vocab, load_weights
from .parts import EXPORTED_VOCAB, FORMAT, write_json
from .saving import TrainingState, save_checkpoint
from .tensors import dimensions, set_weights, weights

__all__ = [
    "EXPORTED_VOCAB",
    "FORMAT",
    "LoadedModel",
    "TrainingState",
    "best",
    "checkpoints",
    "config_of",
    "dimensions",
    "find_checkpoint",
    "latest",
    "load_config",
    "load_model",
    "load_training",
    "load_vocab",
    "load_weights",
    "put_damaged_aside",
    "save_checkpoint",
    "set_weights",
    "step_folder",
    "valid_loss",
    "weights",
    "write_json",
]
