"""Models on the Hugging Face hub: `hf:NAME` stands for one, wherever a run is asked for."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import torch

from transformer_xl import checkpoint
from transformer_xl.checkpoint import LoadedModel, save_checkpoint
from transformer_xl.data.datasets import cache_folder

from .huggingface import VOCABULARIES, WEIGHTS
from .reading import read_model

HUB = "hf:"
_WANTED = ("config.json", *VOCABULARIES)


def load_model(path: str | Path, *, device: str | torch.device = "cpu", backend: str = "auto") -> LoadedModel:
    """Load a model, ready to evaluate and generate.

    Args:
        path: a run folder (its best checkpoint by validation loss if known, else its last), a checkpoint folder, what
            `txl convert` wrote, or `hf:NAME` for a Transformer-XL on the Hugging Face hub.
        backend: which implementation of the attention op.

    Raises:
        FileNotFoundError: there is nothing at `path`, or no checkpoint in it.
        ValueError: the checkpoint is damaged, foreign, or its parts do not fit each other.
    """
    return checkpoint.load_model(local(path), device=device, backend=backend)


def local(path: str | Path) -> Path:
    """A folder on this machine: `path` itself, or what `hf:NAME` stands for, fetched and converted once per version.

    Raises:
        ValueError: the hub package is not installed, or what it has is no Transformer-XL.
        OSError: there is no such model, or the hub cannot be reached.
    """
    if not str(path).startswith(HUB):
        return Path(path)
    name = str(path).removeprefix(HUB)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ValueError(
            f'{path} is on the Hugging Face hub: run `pip install "transformer-xl[hf]"` to fetch it.'
        ) from None
    try:
        files = _needed(name)
        snapshot = Path(snapshot_download(name, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise OSError(f"{path} could not be fetched: {str(error).splitlines()[0]}") from error
    folder = cache_folder() / "hub" / f"{name.replace('/', '--')}@{snapshot.name}"
    if not folder.is_dir():
        found = read_model(snapshot, "huggingface")
        if found.vocab is None:
            raise ValueError(f"{path} holds no vocabulary. Fetch it, and use `txl convert` with --vocab.")
        save_checkpoint(folder, model=found.model(), vocab=found.vocab, config=found.config)
    return folder


def _needed(name: str) -> list[str]:
    """The files of the hub's model that are read: the weights once, safetensors where they are there."""
    from huggingface_hub import list_repo_files

    files = list_repo_files(name)
    weights = next((found for pattern in WEIGHTS if (found := fnmatch.filter(files, pattern))), [])
    return [*(file for file in files if file in _WANTED), *weights]
