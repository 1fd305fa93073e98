"""Checkpoints of the authors' PyTorch code and of NVIDIA's, which descends from it.

The authors' (github.com/kimiyoung/transformer-xl, pytorch/) are a module or a state dict. NVIDIA's
(DeepLearningExamples, LanguageModeling/Transformer-XL) are a dict for each run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ..mistake import Mistake
from .pickles import StandIn, module_parts, module_state, read_pickle
from .source import Source, is_state
from .vocabulary import pickled_vocabulary, read_vocabulary

_OWN = ("n_layer", "n_head", "d_model", "d_head", "d_embed", "tgt_len", "mem_len", "clamp_len", "same_length")
_PARTS = (
    ("vocab_size", "word_emb", "n_token"),
    ("div_val", "word_emb", "div_val"),
    ("cutoffs", "crit", "cutoffs"),
    ("dropout", "drop", "p"),
    ("dropatt", "layers.0.dec_attn.dropatt", "p"),
    ("layer_norm_epsilon", "layers.0.dec_attn.layer_norm", "eps"),
    ("pre_lnorm", "layers.0.dec_attn", "pre_lnorm"),
)
"""Hyper-parameters, and the parts of the module that hold them under which names."""


def read_original(path: Path) -> Source:
    """Read `model.pt` or its folder, with `cache.pt` and JSON files in the folder if there are any."""
    file = path / "model.pt" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"There is no {file}. Give the authors' model.pt, a state dict, or the folder of one.")
    source = Source(path, keeps_ties=True, states_training=True)
    content = state = read_pickle(file)
    if isinstance(content, StandIn):
        parts = module_parts(content)
        if "module" in parts:  # in a data-parallel wrapper
            parts = module_parts(parts["module"])
        source.add_settings(_settings(parts))
        state = module_state(parts)
    elif isinstance(content, Mapping):
        wrapped = next((name for name in ("model_state_dict", "state_dict") if name in content), None)
        state = content[wrapped] if wrapped else content
        others = [str(name) for name in content if wrapped and name != wrapped]
        source.left_out |= dict.fromkeys(others, "stored beside the state dict")
    if not is_state(state):
        kind = content.name if isinstance(content, StandIn) else f"a {type(content).__name__} of other things"
        raise Mistake(f"{file} must hold a module or its state dict, and holds {kind}. Is it --from nvidia?")
    source.add_arrays(state, lambda name: name.removeprefix("module."))
    source.add_settings_beside(file.parent)
    if (file.parent / "cache.pt").is_file():
        source.vocab = read_vocabulary(file.parent / "cache.pt")
    return source


def _settings(parts: Mapping[str, StandIn]) -> dict[str, object]:
    """The hyper-parameters among the attributes of a pickled module."""
    places = [*((name, "", name) for name in _OWN), *_PARTS]
    return {
        name: parts[part].attributes[attribute]
        for name, part, attribute in places
        if part in parts and attribute in parts[part].attributes
    }


def read_nvidia(path: Path) -> Source:
    """Read a checkpoint file: its `model_state`, and if present its `model_config` (or `args`) and `vocab`."""
    if path.is_dir():
        raise Mistake(f"SRC must be the file of NVIDIA's checkpoint, got the folder {path}. Name the file.")
    content = read_pickle(path)
    state = content.get("model_state") if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping) or not is_state(state):
        raise Mistake(f"{path} must be a dict with model_state, as NVIDIA's code saves it. Is it --from original?")
    source = Source(path, same_length=1, states_training=True)
    source.add_arrays(state, _original_name)
    stated_in = "model_config" if "model_config" in content else "args"
    settings = content.get(stated_in)
    settings = settings.attributes if isinstance(settings, StandIn) else settings
    source.add_settings(settings if isinstance(settings, Mapping) else {})
    others = [str(name) for name in content if name not in ("model_state", stated_in, "vocab")]
    source.left_out |= dict.fromkeys(others, "state of the training")
    source.vocab = pickled_vocabulary(content, str(path))
    return source


def _original_name(name: str) -> str:
    name = re.sub(r"crit\.out_layers_weights\.(\d+)", r"crit.out_layers.\1.weight", name)
    return re.sub(r"crit\.out_layers_biases\.(\d+)", r"crit.out_layers.\1.bias", name)
