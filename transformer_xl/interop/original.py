"""Checkpoints of the authors' PyTorch code (github.com/kimiyoung/transformer-xl, pytorch/): a module or state dict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..mistake import Mistake
from .pickles import StandIn, module_state, read_pickle
from .source import Source, is_state
from .vocabulary import read_vocabulary

_OWN = ("n_layer", "n_head", "d_model", "d_head", "d_embed", "tgt_len", "mem_len", "clamp_len", "same_length")
_ATTENTION = ("layers", "0", "dec_attn")
_PARTS = (
    ("vocab_size", ("word_emb",), "n_token"),
    ("div_val", ("word_emb",), "div_val"),
    ("cutoffs", ("crit",), "cutoffs"),
    ("dropout", ("drop",), "p"),
    ("dropatt", (*_ATTENTION, "dropatt"), "p"),
    ("layer_norm_epsilon", (*_ATTENTION, "layer_norm"), "eps"),
    ("pre_lnorm", _ATTENTION, "pre_lnorm"),
)
"""Hyper-parameters, and the parts of the module that hold them under which names."""


def read_original(path: Path) -> Source:
    """Read `model.pt` or its folder, with `cache.pt` and JSON files in the folder if there are any."""
    file = path / "model.pt" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"There is no {file}. Give the authors' model.pt, a state dict, or the folder of one.")
    source = Source(path, "original")
    content = state = read_pickle(file)
    if isinstance(content, StandIn):
        content = _child(content, "module") or content  # in a data-parallel wrapper
        source.state(_settings(content))
        state = module_state(content)
    elif isinstance(content, Mapping):
        wrapped = next((name for name in ("model_state_dict", "state_dict") if name in content), None)
        state = content[wrapped] if wrapped else content
        others = [str(name) for name in content if wrapped and name != wrapped]
        source.left_out |= dict.fromkeys(others, "stored beside the state dict")
    if not is_state(state):
        kind = content.name if isinstance(content, StandIn) else f"a {type(content).__name__} of other things"
        raise Mistake(f"{file} must hold a module or its state dict, and holds {kind}. Is it --from nvidia?")
    source.add_state(state, lambda name: name.removeprefix("module."))
    source.state_beside(file.parent)
    if (file.parent / "cache.pt").is_file():
        source.vocab = read_vocabulary(file.parent / "cache.pt")
    return source


def _settings(module: StandIn) -> dict[str, object]:
    """The hyper-parameters among the attributes of a pickled module."""
    stated = {name: module.attributes[name] for name in _OWN if name in module.attributes}
    for name, path, attribute in _PARTS:
        part = _child(module, *path)
        if part is not None and attribute in part.attributes:
            stated[name] = part.attributes[attribute]
    return stated


def _child(module: StandIn, *names: str) -> StandIn | None:
    found: object = module
    for name in names:
        children = found.attributes.get("_modules") if isinstance(found, StandIn) else None
        found = children.get(name) if isinstance(children, Mapping) else None
    return found if isinstance(found, StandIn) else None
