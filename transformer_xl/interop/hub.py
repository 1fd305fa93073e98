"""Load models from the Hugging Face hub. `hf:NAME` is allowed wherever a run is."""

from __future__ import annotations

import fnmatch
import hashlib
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from .. import run
from ..data.datasets import cache_folder
from ..evaluation.language_model import LanguageModel
from ..mistake import Mistake
from ..run import EXPORTED_VOCAB, save_checkpoint
from .huggingface import VOCABULARIES, WEIGHTS
from .reading import read_model

HUB = "hf:"
_PATIENCE = 3.0
"""Seconds to wait for the hub to resolve a name to a version."""
_WANTED = ("config.json", *VOCABULARIES)


def load_model(path: str | Path, *, device: str | torch.device = "cpu", backend: str = "auto") -> LanguageModel:
    """Load a trained model with its vocabulary and settings, to score and generate text.

    Args:
        path: a run folder (this loads its best checkpoint by validation loss, or the last if no loss is known), a
            checkpoint folder, a folder that `txl convert` wrote, or `hf:NAME` for a model on the Hugging Face hub.
        backend: the implementation of the attention op.

    Raises:
        FileNotFoundError: there is nothing at `path`, or no checkpoint in it.
        ValueError: the checkpoint is damaged or of another kind, or its files do not fit each other.
    """
    return LanguageModel(*run.load_model(local(path), device=device, backend=backend))


def local(path: str | Path) -> Path:
    """The local folder of a model: `path` itself, or the converted model of `hf:NAME` (`hf:NAME@REVISION`) or of a
    folder that `txl convert --to-format huggingface` wrote.

    A model of the hub is fetched and converted once per version. The hub is asked once for the version. If it does not
    answer within seconds, the version converted last is used, otherwise the one in the hub package's cache; a warning
    names it.

    Raises:
        ValueError: the hub package is not installed, or the model is not a Transformer-XL.
        OSError: there is no such model, or the hub cannot be reached and no version was fetched before.
    """
    if not str(path).startswith(HUB):
        return _converted_once(Path(path)) if Path(path, EXPORTED_VOCAB).is_file() else Path(path)
    try:
        from huggingface_hub import model_info, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise Mistake(f"{path} is on the Hugging Face hub: run `pip install huggingface_hub` to fetch it.") from None
    name, _, revision = str(path).removeprefix(HUB).partition("@")
    if ".." in Path(name, revision).parts or Path(revision).is_absolute():  # they are used in a path in the cache
        raise Mistake(f"{path} must be hf:NAME or hf:NAME@REVISION, as the hub writes them.")
    converted = cache_folder() / "hub" / name.replace("/", "--")
    if (converted / revision / "config.json").is_file():
        return converted / revision
    try:  # other calls of the library retry for a long time
        asked = model_info(name, revision=revision or None, timeout=_PATIENCE)
        files = _files_to_read([file.rfilename for file in asked.siblings or ()])
        if (converted / str(asked.sha)).is_dir():
            return converted / str(asked.sha)
        snapshot = Path(snapshot_download(name, revision=asked.sha, allow_patterns=files))
    except Exception as error:  # the library has many classes of errors
        try:
            if isinstance(error, HfHubHTTPError):
                raise
            before = [] if revision else sorted(converted.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
            cached = partial(snapshot_download, name, revision=revision or None, local_files_only=True)
            snapshot = before[-1].parent if before else Path(cached())
        except (OSError, ValueError):  # its cache has none, or the name is invalid
            reason, *_ = str(error).splitlines() or [type(error).__name__]
            raise OSError(f"{path} could not be fetched: {reason}") from error
        warnings.warn(f"The hub cannot be reached: {snapshot.name}, fetched before, is used.", stacklevel=2)
    folder = converted / snapshot.name
    if not folder.is_dir():
        _convert(snapshot, folder)
    return folder


def _converted_once(exported: Path) -> Path:
    """The converted model of an exported folder, in the cache by its content."""
    files = [exported / name for name in _files_to_read(sorted(path.name for path in exported.iterdir()))]
    known = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            known.update(hashlib.file_digest(opened, "sha256").digest())
    folder = cache_folder() / "exported" / known.hexdigest()[:32]
    if not folder.is_dir():
        _convert(exported, folder)
    return folder


def _convert(source: Path, folder: Path) -> None:
    found = read_model(source, "huggingface")
    model, vocab, config = found.build()
    save_checkpoint(folder, model=model, vocab=vocab, config=config, report=found.report)


def _files_to_read(files: Sequence[str]) -> list[str]:
    """The files of a model on the hub to read. Only one kind of weights is read: safetensors if there are any."""
    weights = next((found for pattern in WEIGHTS if (found := fnmatch.filter(files, pattern))), [])
    return [*(file for file in files if file in _WANTED), *weights]
