"""Load models from the Hugging Face hub. `hf:NAME` is allowed wherever a run is."""

from __future__ import annotations

from pathlib import Path

import torch

from ..data.datasets import cache_folder
from ..evaluation.language_model import LanguageModel
from ..mistake import Mistake
from ..run.checkpoint import load_model as load_run
from ..run.checkpoint import save_checkpoint
from ..runtime.files import wait_for
from .huggingface import PICKLED, TENSORS, VOCABULARIES
from .reading import read_model

HUB = "hf:"


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
    return LanguageModel(*load_run(local(path), device=device, backend=backend))


def local(path: str | Path) -> Path:
    """The local folder of a model: `path` itself, or the converted model of `hf:NAME` (`hf:NAME@REVISION`).

    A model of the hub is converted once per version. Without a network, the hub's package finds the version that it
    fetched before.

    Raises:
        ValueError: the hub package is not installed, or the model is not a Transformer-XL.
        OSError: there is no such model, or the hub cannot be reached and no version was fetched before.
    """
    if not str(path).startswith(HUB):
        return Path(path)
    snapshot = fetched(path)
    name = str(path).removeprefix(HUB).partition("@")[0]
    folder = cache_folder() / "hub" / name.replace("/", "--") / snapshot.name
    if folder.is_dir():
        return folder
    with wait_for(folder.with_name(f".{folder.name}.lock"), f"converting {path}"):
        if not folder.is_dir():
            found = read_model(snapshot, "huggingface")
            if found.vocab is None:
                convert = f"`txl convert {path} --from huggingface --vocab FILE --to DIR`"
                raise Mistake(f"{path} must have a vocabulary, and has none. Run {convert}, and name DIR instead.")
            save_checkpoint(folder, model=found.model, vocab=found.vocab, config=found.config, report=found.report)
    return folder


def fetched(path: str | Path) -> Path:
    """The folder of `hf:NAME` in the cache of the hub's package. Pickled weights are fetched if there are no others."""
    name, _, revision = str(path).removeprefix(HUB).partition("@")
    if ".." in Path(name, revision).parts or Path(revision).is_absolute():  # they are used in a path in the cache
        raise Mistake(f"{path} must be hf:NAME or hf:NAME@REVISION, as the hub writes them.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise Mistake(f"{HUB}{name} is on the Hugging Face hub: run `pip install huggingface_hub`.") from None
    small = ["config.json", *VOCABULARIES]
    try:
        snapshot = snapshot_download(name, revision=revision or None, allow_patterns=[*small, TENSORS])
        if not any(Path(snapshot).glob(TENSORS)):
            snapshot = snapshot_download(name, revision=revision or None, allow_patterns=[*small, PICKLED])
    except Exception as error:  # the library has many classes of errors
        reason, *_ = str(error).splitlines() or [type(error).__name__]
        raise OSError(f"{HUB}{name} could not be fetched: {reason}") from error
    return Path(snapshot)
