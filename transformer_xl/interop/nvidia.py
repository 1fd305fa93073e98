"""NVIDIA's PyTorch code (DeepLearningExamples, LanguageModeling/Transformer-XL): a dict with everything of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ..mistake import Mistake
from .pickles.unpickle import StandIn, read_pickle
from .source import Source, is_state
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
        raise Mistake(f"{path} must be a dict with model_state, as NVIDIA's code saves it. Is it --from original?")
    source = Source(path, "nvidia")
    source.add_state(state, _original)
    told = "model_config" if "model_config" in content else "args"
    settings = content.get(told)
    settings = settings.attributes if isinstance(settings, StandIn) else settings
    source.state(settings if isinstance(settings, Mapping) else {}, told)
    others = [str(name) for name in content if name not in ("model_state", told, "vocab")]
    source.left_out |= dict.fromkeys(others, "as the state of a training")
    found = pickled_vocabulary(content, str(path))
    source.symbols = None if found is None else lambda: found
    return source


def _original(name: str) -> str:
    for theirs, original in _NAMES.items():
        name = re.sub(theirs, original, name)
    return name
