"""NVIDIA's PyTorch code (DeepLearningExamples, LanguageModeling/Transformer-XL): a dict with everything of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from .original import add_parameters, is_state
from .source import Source
from .unpickle import StandIn, read_pickle
from .vocabulary import pickled_vocabulary

_NAMES = {
    r"crit\.out_layers_weights\.(\d+)": r"crit.out_layers.\1.weight",
    r"crit\.out_layers_biases\.(\d+)": r"crit.out_layers.\1.bias",
}


def read_nvidia(path: Path) -> Source:
    """Read a checkpoint file, of which only `model_state` is needed; `model_config` and `vocab` are taken if there."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Give the checkpoint file in it, checkpoint_best.pt for one.")
    content = read_pickle(path)
    state = content.get("model_state") if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping) or not is_state(state):
        raise ValueError(f"{path} must be a dict with model_state, as NVIDIA's code saves it. Is it --from original?")
    source = Source(path, "nvidia")
    settings = content.get("model_config") or content.get("args")
    settings = settings.attributes if isinstance(settings, StandIn) else settings
    source.stated = dict(settings) if isinstance(settings, Mapping) else {}
    add_parameters(source, state, _original)
    others = [name for name in content if name not in ("model_state", "model_config", "vocab")]
    source.left_out |= dict.fromkeys(others, "as the state of a training")
    found = pickled_vocabulary(content)
    if found:
        source.vocab, source.notes = found
    return source


def _original(name: str) -> str:
    for theirs, original in _NAMES.items():
        name = re.sub(theirs, original, name)
    return name
