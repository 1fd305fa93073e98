"""Checkpoints of the authors' TensorFlow code (github.com/kimiyoung/transformer-xl, tf/), used for their results."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from .bundle import find_bundle, read_bundle
from .source import Source
from .vocabulary import read_vocabulary

_NAMES = (
    (r"adaptive_embed(?:/cutoff_(\d+))?/lookup_table", "word_emb.emb_layers.{}.weight", False),
    (r"adaptive_embed(?:/cutoff_(\d+))?/proj_W", "word_emb.emb_projs.{}", True),
    (r"adaptive_softmax(?:/cutoff_(\d+))?/(?:b|bias)", "crit.out_layers.{}.bias", False),
    (r"adaptive_softmax(?:/cutoff_(\d+))?/proj", "crit.out_projs.{}", True),
    (r"adaptive_softmax/cutoff_0/cluster_W", "crit.cluster_weight", False),
    (r"adaptive_softmax/cutoff_0/cluster_b", "crit.cluster_bias", False),
    (r"layer_(\d+)/rel_attn/(qkv|r|o)/kernel", "layers.{}.dec_attn.{}_net.weight", True),
    (r"layer_(\d+)/rel_attn/LayerNorm/gamma", "layers.{}.dec_attn.layer_norm.weight", False),
    (r"layer_(\d+)/rel_attn/LayerNorm/beta", "layers.{}.dec_attn.layer_norm.bias", False),
    (r"layer_(\d+)/ff/layer_1/kernel", "layers.{}.pos_ff.CoreNet.0.weight", True),
    (r"layer_(\d+)/ff/layer_1/bias", "layers.{}.pos_ff.CoreNet.0.bias", False),
    (r"layer_(\d+)/ff/layer_2/kernel", "layers.{}.pos_ff.CoreNet.3.weight", True),
    (r"layer_(\d+)/ff/layer_2/bias", "layers.{}.pos_ff.CoreNet.3.bias", False),
    (r"layer_(\d+)/ff/LayerNorm/gamma", "layers.{}.pos_ff.layer_norm.weight", False),
    (r"layer_(\d+)/ff/LayerNorm/beta", "layers.{}.pos_ff.layer_norm.bias", False),
    (r"(r_[wr]_bias)", "{}", False),
)
"""Names after `transformer/`, the original's names for them, and whether the matrix is transposed."""

_TRAINING = re.compile(
    r".*/(Adam|Adam_1|Momentum|ExponentialMovingAverage)|beta[12]_power|global_step|.*learning_rate.*"
)


def read_tensorflow(path: Path) -> Source:
    """Read a checkpoint, given as its prefix, one of its files or its folder, with `cache.pkl` and JSON files there.

    The released archives have two folders, `model` and `data`. Then `path` is the folder that contains both.
    """
    prefix = find_bundle(path / "model" if (path / "model").is_dir() else path)
    folders = [folder for folder in (prefix.parent.parent / "data", prefix.parent) if folder.is_dir()]
    source = Source(path, zero_memory=True, clusters_reversed=False, same_length=1)
    source.add_settings({"layer_norm_epsilon": 1e-12, "pre_lnorm": False})
    for name, array in read_bundle(prefix).items():
        if _TRAINING.fullmatch(name):
            source.left_out[name] = "state of the training"
        elif array is None:
            source.left_out[name] = "no fractions"
        else:
            canonical, transposed = _canonical(name)
            source.add(name, canonical, array.T if transposed and array.ndim == 2 else array)
    for folder in folders:
        source.add_settings_beside(folder)
        if (folder / "cache.pkl").is_file():
            source.vocab = read_vocabulary(folder / "cache.pkl")
    if source.stated.get("proj_same_dim") is not True:
        _add_identities(source)
    return source


def _canonical(name: str) -> tuple[str, bool]:
    for pattern, original, transposed in _NAMES:
        if match := re.fullmatch(f"transformer/{pattern}", name):
            return original.format(*(group or "0" for group in match.groups())), transposed
    return name, False


def _add_identities(source: Source) -> None:
    """Add identities as missing projections: with `proj_same_dim` false, a band as wide as the model has none."""
    output = source.arrays.get("layers.0.dec_attn.o_net.weight")
    tables = [
        name for name, array in source.arrays.items() if re.match(r"word_emb\.emb_layers", name) and array.ndim == 2
    ]
    if len(tables) < 2 or output is None:
        return
    for name in tables:
        band, width = name.split(".")[2], source.arrays[name].shape[1]
        projections = [f"word_emb.emb_projs.{band}", f"crit.out_projs.{band}"]
        if width == len(output) and not source.arrays.keys() & set(projections):
            source.arrays |= dict.fromkeys(projections, torch.eye(width, dtype=output.dtype))
            source.notes.append(f"Band {band} has no projection (proj_same_dim is false): here it is the identity.")
