"""Hugging Face's TransfoXL (transformers 2 to 4), and the folders that `txl convert --to-format huggingface` writes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from transformer_xl.checkpoint import EXPORTED_VOCAB, config_of
from transformer_xl.data.vocab import Vocab
from transformer_xl.settings import TransformerXLConfig

from .original import add_parameters, is_state
from .source import Source, read_json
from .unpickle import read_pickle
from .vocabulary import read_vocabulary

_WEIGHTS = ("model.safetensors", "model-*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin")
_VOCABULARIES = ("vocab.pkl", "vocab.bin", "vocab.txt")
_STATED = {"tie_word_embeddings": "tie_weight"}
OWN_TYPE = "transformer-xl"


def read_huggingface(path: Path) -> Source:
    """Read a model folder: config.json, safetensors or a pickled state dict, and the vocabulary."""
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} must be a folder with config.json and the weights, as save_pretrained writes it."
        )
    config = read_json(path / "config.json")
    source = Source(path, "huggingface")
    if config.get("model_type") == OWN_TYPE:
        own = {field.name: config[field.name] for field in fields(TransformerXLConfig) if field.name in config}
        source.run = config_of({"model": own, **config.get("run", {})}, path / "config.json")
        source.vocab = Vocab.from_json(read_json(path / EXPORTED_VOCAB))
        add_parameters(source, _weights(path), lambda name: name.removeprefix("model."))
        return source
    if config.get("model_type", "transfo-xl") != "transfo-xl":
        raise ValueError(f"{path} must hold a model of type transfo-xl, and holds {config['model_type']!r}.")
    source.stated = {_STATED.get(name, name): value for name, value in config.items()}
    add_parameters(source, _weights(path), lambda name: name.removeprefix("transformer."))
    if not config.get("untie_r", True):
        _restore_shared(source)
    file = next((path / name for name in _VOCABULARIES if (path / name).is_file()), None)
    if file is not None:
        source.vocab, source.notes = read_vocabulary(file)
    return source


def _weights(folder: Path) -> dict[str, Tensor]:
    """The arrays of the first kind of weight files there is, however many these are."""
    files = next((found for pattern in _WEIGHTS if (found := sorted(folder.glob(pattern)))), [])
    if not files:
        raise FileNotFoundError(f"{folder} holds no weights: {', '.join(_WEIGHTS)}. Get the whole folder.")
    arrays: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".bin":
            found = read_pickle(file)
        else:
            try:
                found = load_file(file)
            except SafetensorError as error:
                raise ValueError(f"{file} is damaged ({error}). Get it again.") from error
        if not is_state(found):
            raise ValueError(f"{file} must hold names and tensors, and holds something else. Get it again.")
        arrays |= found
    return arrays


def _restore_shared(source: Source) -> None:
    """A pair of biases that all layers share may have been saved under the name of any of them."""
    for bias in ("r_w_bias", "r_r_bias"):
        names = [name for name in source.arrays if re.fullmatch(rf"layers\.\d+\.dec_attn\.{bias}", name)]
        if bias not in source.arrays and names:
            source.add(source.spelled[names[0]], bias, source.arrays[names[0]])
