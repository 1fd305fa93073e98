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
from ..runtime.files import read_table
from .pickles import read_pickle
from .source import Source, is_state
from .vocabulary import read_vocabulary

TENSORS, PICKLED = "model*.safetensors", "pytorch_model*.bin"
VOCABULARIES = (EXPORTED_VOCAB, "vocab.pkl", "vocab.bin", "vocab.txt")
OWN_TYPE = "transformer-xl"
SCORE = "score.weight"
"""The weight of a classifier."""


def read_huggingface(path: Path) -> Source:
    """Read a model folder: config.json, safetensors or a pickled state dict, and the vocabulary."""
    if path.is_file():
        raise Mistake(f"SRC must be the folder of the model, which has a config.json, got the file {path}.")
    config = read_table(path / "config.json", "Get the whole folder.")
    kind = config.get("model_type", "transfo-xl" if "format" not in config else "a checkpoint of this package")
    if kind not in (OWN_TYPE, "transfo-xl"):
        raise Mistake(f"{path} must hold a model of type transfo-xl, and holds {str(kind)[:60]!a}.")
    source, weights = Source(path, zero_memory=True, clusters_reversed=False), weights_of(path)
    own = kind == OWN_TYPE
    if weights.pop(SCORE, None) is not None:
        reads = "AutoModelForSequenceClassification loads" if own else "transformer_xl.hf.read_classifier reads"
        source.left_out[SCORE] = f"a classifier's: {reads} it"
    if own:
        source.run = _exported_run(config, path / "config.json")
    else:
        source.add_settings(config)
    source.add_arrays(weights, lambda name: name.removeprefix("model." if own else "transformer."))
    if not own and not any(name.startswith("crit.") for name in source.arrays):
        _add_softmax(source)
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
    own_lengths = run.writing_lengths(run.eval_lengths)
    if all(getattr(own_lengths, name) == value for name, value in lengths.items()):
        return run
    train = {**sections.get("train", {}), **lengths}
    test = {**sections.get("eval", {}), **dict.fromkeys(lengths)}  # none means: as in training
    return config_of({**sections, "model": own, "train": train, "eval": test}, file)


def _add_softmax(source: Source) -> None:
    """Add the softmax that a model without a head lacks: tied to the embedding, its biases and clusters zero."""
    arrays = source.arrays
    names = (f"word_emb.emb_layers.{i}.weight" for i in range(len(arrays)))
    tables = [arrays[name] for name in names if name in arrays]
    stated = source.stated.get("cutoffs")
    whole = isinstance(stated, list) and all(type(cutoff) is int for cutoff in stated)
    if any(table.ndim != 2 for table in tables) or not (stated is None or whole):
        return  # both are reported where they are used
    cutoffs = [cutoff for cutoff in stated or () if 0 < cutoff < sum(map(len, tables))]
    for i, table in enumerate(tables):
        arrays[f"crit.out_layers.{i}.bias"] = table.new_zeros(len(table))
    if tables and cutoffs:
        arrays["crit.cluster_weight"] = tables[0].new_zeros(len(cutoffs), tables[0].shape[1])
        arrays["crit.cluster_bias"] = tables[0].new_zeros(len(cutoffs))
    source.notes.append(
        "It has no softmax, so its probabilities mean nothing; its vectors are those of the checkpoint."
    )


def weights_of(folder: Path) -> dict[str, Tensor]:
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
