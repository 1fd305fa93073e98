"""Checkpoints of Hugging Face's TransfoXL (transformers 2 to 4), and `txl convert --to-format huggingface`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..config.settings import Lengths, RunConfig, TransformerXLConfig
from ..mistake import Mistake
from ..run.checkpoint import config_of
from ..run.parts import EXPORTED_VOCAB
from .pickles import read_pickle
from .source import Dialect, Source, is_state, read_json
from .vocabulary import read_vocabulary

TENSORS, PICKLED = "model*.safetensors", "pytorch_model*.bin"
VOCABULARIES = (EXPORTED_VOCAB, "vocab.pkl", "vocab.bin", "vocab.txt")
OWN_TYPE = "transformer-xl"


def read_huggingface(path: Path) -> Source:
    """Read a model folder: config.json, safetensors or a pickled state dict, and the vocabulary."""
    config = read_json(path / "config.json")
    kind = config.get("model_type", "transfo-xl" if "format" not in config else "a checkpoint of this package")
    source = Source(path, Dialect(zero_memory=True, clusters_reversed=False))
    if kind == OWN_TYPE:
        source.run = _exported_run(config, path / "config.json")
        source.add_state(_weights(path), lambda name: name.removeprefix("model."))
    elif kind == "transfo-xl":
        source.state(config)
        source.add_state(_weights(path), lambda name: name.removeprefix("transformer."))
    else:
        raise Mistake(f"{path} must hold a model of type transfo-xl, and holds {str(kind)[:60]!a}.")
    file = next((path / name for name in VOCABULARIES if (path / name).is_file()), None)
    source.vocab = read_vocabulary(file) if file else None
    return source


def _exported_run(config: Mapping[str, object], file: Path) -> RunConfig:
    """The run of an exported model. Lengths that were changed after the export are for evaluation and training."""
    sections = config.get("run")
    if not isinstance(sections, dict):
        raise Mistake(f"{file} must hold a table, run. Restore it from a copy.")
    own = {field.name: config[field.name] for field in fields(TransformerXLConfig) if field.name in config}
    run = config_of({**sections, "model": own}, file)
    lengths = {field.name: config[field.name] for field in fields(Lengths) if field.name in config}
    if all(getattr(run.eval_lengths, name) == value for name, value in lengths.items()):
        return run
    train = {**sections.get("train", {}), **lengths}
    test = {**sections.get("eval", {}), **dict.fromkeys(lengths)}  # none means: as in training
    return config_of({**sections, "model": own, "train": train, "eval": test}, file)


def _weights(folder: Path) -> dict[str, Tensor]:
    """The arrays of all weight files in the folder: of safetensors, if there are any."""
    files = sorted(folder.glob(TENSORS)) or sorted(folder.glob(PICKLED))
    if not files:
        raise FileNotFoundError(f"{folder} holds no model.safetensors and no pytorch_model.bin. Get the whole folder.")
    arrays: dict[str, Tensor] = {}
    for file in files:
        try:
            found = read_pickle(file) if file.suffix == ".bin" else load_file(file)
        except (SafetensorError, TypeError, OSError) as error:  # a TypeError: absurd sizes
            raise Mistake(f"{file} is damaged ({str(error).splitlines()[0]}). Get it again.") from error
        if not is_state(found):
            raise Mistake(f"{file} must hold names and tensors, and holds something else. Get it again.")
        arrays |= found
    return arrays
