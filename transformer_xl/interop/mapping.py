"""Convert the original code's parameters to ours, with one table of entries.

    word_emb.emb_layers.0.weight             embedding.tables.0
    layers.3.dec_attn.qkv_net.weight         backbone.layers.3.attention.qkv.weight
    crit.out_layers.1.bias                   softmax.bias, the rows of band 1
    crit.cluster_weight                      softmax.cluster_weight
    r_w_bias                                 backbone.content_bias, row 0

Other programs' names are first converted to the original's (`pytorch`, `tensorflow`, `huggingface`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config.settings import TransformerXLConfig
from ..mistake import Mistake, listing
from ..model.transformer_xl import TransformerXL
from ..run.parts import dimensions
from .source import Source


class Entry(NamedTuple):
    """An array of theirs, and the parameter of ours (or its `rows`) with the same content."""

    theirs: str
    ours: str
    rows: slice | None = None


_LAYER = {
    "dec_attn.qkv_net.weight": "attention.qkv.weight",
    "dec_attn.r_net.weight": "attention.position.weight",
    "dec_attn.o_net.weight": "attention.output.weight",
    "dec_attn.layer_norm.weight": "attention.norm.weight",
    "dec_attn.layer_norm.bias": "attention.norm.bias",
    "pos_ff.CoreNet.0.weight": "feed_forward.inner.weight",
    "pos_ff.CoreNet.0.bias": "feed_forward.inner.bias",
    "pos_ff.CoreNet.3.weight": "feed_forward.outer.weight",
    "pos_ff.CoreNet.3.bias": "feed_forward.outer.bias",
    "pos_ff.layer_norm.weight": "feed_forward.norm.weight",
    "pos_ff.layer_norm.bias": "feed_forward.norm.bias",
}
_BIASES = {"r_w_bias": "backbone.content_bias", "r_r_bias": "backbone.position_bias"}


def entries(config: TransformerXLConfig, names: Iterable[str] = ()) -> list[Entry]:
    """The entries of all arrays of a model with this shape.

    Args:
        names: the names of a source's arrays. Programs differ in them: biases per layer or stacked, a softmax bias per
            band or one.
    """
    names = set(names)
    bands = [slice(low, high) for low, high in pairwise((0, *config.cutoffs, config.vocab_size))]
    banded = config.div_val > 1 or "crit.out_layers.1.bias" in names
    projected = config.div_val > 1 or config.embed_width != config.d_model
    found = []
    for i in range(len(bands) if config.div_val > 1 else 1):
        found.append(Entry(f"word_emb.emb_layers.{i}.weight", f"embedding.tables.{i}"))
        found.append(Entry(f"crit.out_layers.{i}.weight", f"softmax.tables.{i}"))
        if projected:
            found.append(Entry(f"word_emb.emb_projs.{i}", f"embedding.projections.{i}"))
    for i, band in enumerate(bands):
        if banded or i == 0:
            found.append(Entry(f"crit.out_layers.{i}.bias", "softmax.bias", band if banded else None))
        if projected:
            found.append(Entry(f"crit.out_projs.{i}", f"softmax.projections.{i}"))
    if config.cutoffs:
        found += [Entry(f"crit.{name}", f"softmax.{name}") for name in ("cluster_weight", "cluster_bias")]
    for layer in range(config.n_layer):
        found += [
            Entry(f"layers.{layer}.{theirs}", f"backbone.layers.{layer}.{ours}") for theirs, ours in _LAYER.items()
        ]
    for theirs, ours in _BIASES.items():
        layers = [f"layers.{layer}.dec_attn.{theirs}" for layer in range(config.n_layer)]
        if config.untie_r and theirs not in names:
            found += [Entry(name, ours, slice(i, i + 1)) for i, name in enumerate(layers)]
        else:
            found.append(Entry(theirs, ours))
            found += [Entry(name, ours) for name in layers if name in names]  # other names of the same pair
    return found


@torch.no_grad()
def fill(model: TransformerXL, source: Source) -> None:
    """Copy a source's arrays into a model.

    Raises:
        ValueError: lists every array that is missing, unexpected, of another shape, not finite, or different from an
            array to which it is tied.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = entries(model.config, source.arrays)
    if source.run is not None:  # an export of this package, by our names
        found = [Entry(name, name) for name in parameters]
    problems: list[str] = []
    missing: dict[int, str] = {}
    filled: set[int] = set()
    for entry in found:
        own = parameters[entry.ours][entry.rows or ...]  # the gain of QK-norm is one number
        array = source.arrays.get(entry.theirs)
        if array is None:
            missing.setdefault(own.data_ptr(), entry.theirs)
            continue
        array = array[None] if entry.ours in _BIASES.values() and array.ndim == 2 else array
        fault = _fault(array, own, own.data_ptr() in filled)
        if fault is None:
            own.copy_(array)
        else:
            problems.append(f"{source.spelling(entry.theirs)} must {fault}")
        filled.add(own.data_ptr())
    problems += [f"{name} is missing" for address, name in missing.items() if address not in filled]
    covered = {id(parameters[entry.ours]) for entry in found}
    ours = [name for name, parameter in model.named_parameters() if id(parameter) not in covered]
    problems += [f"{name} of this package is nowhere in it" for name in ours]
    known = {entry.theirs for entry in found}
    problems += [f"{source.spelling(name)} is unexpected" for name in source.arrays if name not in known]
    if problems:
        raise Mistake(f"{source.path} does not hold the model it should: {listing(problems, 12)}.")


def _fault(array: Tensor, own: Tensor, filled: bool) -> str | None:
    """The fault of an array, as the words after "must". Weights are `filled` by the first array of their ties."""
    if array.shape != own.shape:
        return f"be {dimensions(own.shape)} but is {dimensions(array.shape)}"
    if not array.isfinite().all():
        return "be finite but holds numbers that are not"
    if filled and not torch.equal(array.to(own.dtype), own):
        return "equal what it is tied to but differs"
    return None


def shape_of(source: Source, div_val: int | None) -> dict[str, Any]:
    """The settings of `TransformerXLConfig` that follow from the arrays.

    `div_val` is the stated one: the widths of the tables may allow several.

    If `div_val` is 1, the original's arrays do not show where bands end, so `cutoffs` is absent.

    Raises:
        ValueError: the source is not a Transformer-XL.
    """
    arrays = source.arrays
    output = _require_array(source, "layers.0.dec_attn.o_net.weight", 2)
    inner = _require_array(source, "layers.0.pos_ff.CoreNet.0.weight", 2)
    untied = "r_w_bias" not in arrays and source.stated.get("untie_r") is not False
    # One pair for all layers may be stored under the name of any layer.
    bias = "r_w_bias" if "r_w_bias" in arrays else next((name for name in arrays if "r_w_bias" in name), "r_w_bias")
    content_bias = _require_array(source, bias, 2, 3)
    tables = [
        _require_array(source, f"word_emb.emb_layers.{i}.weight", 2) for i in range(_count(source, r"word_emb\.\w+"))
    ]
    biases = [
        _require_array(source, f"crit.out_layers.{i}.bias", 1) for i in range(_count(source, r"crit\.out_layers"))
    ]
    clusters = len(_require_array(source, "crit.cluster_weight", 2)) if "crit.cluster_weight" in arrays else 0
    bands = max((tables, biases), key=len)
    found: dict[str, Any] = {
        "n_layer": _count(source, "layers"),
        "d_model": output.shape[0],
        "d_inner": inner.shape[0],
        "n_head": content_bias.shape[-2],
        "d_head": content_bias.shape[-1],
        "untie_r": untied or content_bias.ndim == 3,
        "vocab_size": sum(len(table) for table in tables),
        "d_embed": tables[0].shape[1],
        "div_val": 1 if len(tables) == 1 else div_val or round(tables[0].shape[1] / tables[1].shape[1]),
        "tie_projs": (),
    }
    if len(bands) > 1 or not clusters:
        found["cutoffs"] = tuple(accumulate(len(band) for band in bands))[:-1]
    pairs = ((f"crit.out_layers.{i}.weight", f"word_emb.emb_layers.{i}.weight") for i in range(len(tables)))
    found["tie_weight"] = all(_same(source, *pair) for pair in pairs)
    if found["div_val"] > 1 or found["d_embed"] != found["d_model"]:
        count = len(bands) if len(bands) > 1 else clusters + 1
        own = [i if len(tables) > 1 else 0 for i in range(count)]
        pairs = ((f"crit.out_projs.{i}", f"word_emb.emb_projs.{j}") for i, j in enumerate(own))
        tied = tuple(_same(source, *pair) for pair in pairs)
        found["tie_projs"] = tied if any(tied) else ()
    return found


def _same(source: Source, name: str, other: str) -> bool:
    """Whether an array is tied to another one: they are equal, or it is absent and the program stores ties once."""
    arrays = source.arrays
    if name not in arrays:
        return not source.keeps_ties
    return other in arrays and torch.equal(arrays[name], arrays[other])


def _require_array(source: Source, name: str, *ndims: int) -> Tensor:
    """An array of the source with one of these numbers of dimensions; without it, the source is no Transformer-XL."""
    array = source.arrays.get(name)
    if array is None or array.ndim not in ndims:
        has = "lacks" if array is None else f"has a {array.ndim}-dimensional"
        names = ", ".join(list(source.spelled.values())[:4])
        raise Mistake(
            f"{source.path} {has} {source.spelling(name)}, so it is no Transformer-XL of that program; it holds "
            f"{len(source.spelled)} arrays: {names}, ..."
        )
    return array


def _count(source: Source, group: str) -> int:
    """How many different numbers follow `group` in the names, at least 1. Reading the arrays finds gaps."""
    numbers = {match[1] for name in source.arrays if (match := re.match(rf"{group}\.(\d+)\.?", name))}
    return max(len(numbers), 1)
