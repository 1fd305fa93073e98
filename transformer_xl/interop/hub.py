"""Models on the Hugging Face hub: `hf:NAME` stands for one, wherever a run is asked for."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Sequence
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
    """A folder on this machine: `path` itself, or what `hf:NAME` (`hf:NAME@REVISION`) stands for.

    A model of the hub is fetched and converted once per version; where the hub cannot be reached, the version fetched
    last is taken.

    Raises:
        ValueError: the hub package is not installed, or what it has is no Transformer-XL.
        OSError: there is no such model, or the hub cannot be reached and nothing was fetched before.
    """
    if not str(path).startswith(HUB):
        return Path(path)
    try:
        from huggingface_hub import list_repo_files, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise ValueError(
            f"{path} is on the Hugging Face hub: run `pip install huggingface_hub` to fetch it."
        ) from None
    name, _, revision = str(path).removeprefix(HUB).partition("@")
    if ".." in Path(name, revision).parts or Path(revision).is_absolute():  # they become a path in the cache
        raise ValueError(f"{path} must be hf:NAME or hf:NAME@REVISION, as the hub writes them.")
    converted = cache_folder() / "hub" / name.replace("/", "--")
    if revision and (converted / revision).is_dir():
        return converted / revision
    try:
        files = _needed(list_repo_files(name, revision=revision or None))
        snapshot = Path(snapshot_download(name, revision=revision or None, allow_patterns=files))
    except Exception as error:  # the library has a kind of its own for each way to fail
        before = sorted(converted.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
        if before and not revision and not isinstance(error, HfHubHTTPError):
            warnings.warn(f"The hub cannot be reached: {before[-1].parent}, fetched before, is taken.", stacklevel=2)
            return before[-1].parent
        raise OSError(f"{path} could not be fetched: {str(error).splitlines()[0]}") from error
    folder = converted / snapshot.name
    if not folder.is_dir():
        found = read_model(snapshot, "huggingface")
        model, vocab, config = found.loaded()
        save_checkpoint(folder, model=model, vocab=vocab, config=config, report=found.report)
    return folder


def _needed(files: Sequence[str]) -> list[str]:
    """The files of the hub's model that are read: the weights once, safetensors where they are there."""
    weights = next((found for pattern in WEIGHTS if (found := fnmatch.filter(files, pattern))), [])
    return [*(file for file in files if file in _WANTED), *weights]
