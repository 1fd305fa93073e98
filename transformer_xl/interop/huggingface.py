"""Checkpoints of Hugging Face's TransfoXL (transformers 2 to 4), and `txl convert --to-format huggingface`."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..config.settings import Lengths, RunConfig, TransformerXLConfig
from ..mistake import Mistake
from ..run import EXPORTED_VOCAB, config_of
from .pickles import read_pickle
from .source import Source, is_state, read_json
from .vocabulary import read_vocabulary

WEIGHTS = ("model.safetensors", "model-*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin")
VOCABULARIES = (EXPORTED_VOCAB, "vocab.pkl", "vocab.bin", "vocab.txt")
OWN_TYPE = "transformer-xl"
_OTHER_NAMES = {"tie_word_embeddings": "tie_weight"}


def read_huggingface(path: Path) -> Source:
    """Read a model folder: config.json, safetensors or a pickled state dict, and the vocabulary."""
    config = read_json(path / "config.json")
    kind = config.get("model_type", "transfo-xl" if "format" not in config else "a checkpoint of this package")
    source = Source(path, "huggingface")
    if kind == OWN_TYPE:
        own = {field.name: config[field.name] for field in fields(TransformerXLConfig) if field.name in config}
        sections: Any = config.get("run")
        if not isinstance(sections, dict):
            raise Mistake(f"{path / 'config.json'} must hold a table, run. Restore it from a copy.")
        source.run = _with_lengths({**sections, "model": own}, config, source)
        source.add_state(_weights(path), lambda name: name.removeprefix("model."))
    elif kind == "transfo-xl":
        source.state({_OTHER_NAMES.get(name, name): value for name, value in config.items()})
        source.add_state(_weights(path), lambda name: name.removeprefix("transformer."))
        if config.get("untie_r") is False:
            _restore_shared(source)
    else:
        raise Mistake(f"{path} must hold a model of type transfo-xl, and holds {str(kind)[:60]!a}.")
    file = next((path / name for name in VOCABULARIES if (path / name).is_file()), None)
    source.symbols = partial(read_vocabulary, file) if file else None
    return source


def _with_lengths(sections: dict[str, Any], config: dict[str, Any], source: Source) -> RunConfig:
    """The run with these sections and the lengths of `config`, which may have been edited after the export."""
    file = source.path / "config.json"
    run = config_of(sections, file)
    lengths = {field.name: config[field.name] for field in fields(Lengths) if field.name in config}
    if all(getattr(run.eval_lengths, name) == value for name, value in lengths.items()):
        return run
    source.notes.append("Its lengths were changed after the export. Training, if it is resumed, has them too.")
    changed = {"train": lengths, "eval": dict.fromkeys(lengths)}  # in [eval] none means: as in training
    return config_of(sections | {name: {**sections.get(name, {}), **new} for name, new in changed.items()}, file)


def _weights(folder: Path) -> dict[str, Tensor]:
    """The arrays of all weight files in the folder. Only the first kind found in `WEIGHTS` is read."""
    files = next((found for pattern in WEIGHTS if (found := sorted(folder.glob(pattern)))), [])
    if not files:
        raise FileNotFoundError(f"{folder} holds no weights: {', '.join(WEIGHTS)}. Get the whole folder.")
    arrays: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".bin":
            found = read_pickle(file)
        else:
            try:
                found = load_file(file)
            except (SafetensorError, TypeError, OSError) as error:  # a TypeError: absurd sizes
                raise Mistake(f"{file} is damaged ({str(error).splitlines()[0]}). Get it again.") from error
        if not is_state(found):
            raise Mistake(f"{file} must hold names and tensors, and holds something else. Get it again.")
        if twice := arrays.keys() & found.keys():
            raise Mistake(f"{file} must hold other arrays than the files before it, and has {min(twice)} too.")
        arrays |= found
    return arrays


def _restore_shared(source: Source) -> None:
    """Rename the pair of biases that all layers share. It may be saved under the name of any layer."""
    for bias in ("r_w_bias", "r_r_bias"):
        names = [name for name in source.arrays if re.fullmatch(rf"layers\.\d+\.dec_attn\.{bias}", name)]
        if bias not in source.arrays and names:
            source.arrays[bias] = source.arrays.pop(names[0])
            source.spelled[bias] = source.spelled.pop(names[0])
