"""Checkpoints of NVIDIA's PyTorch code (DeepLearningExamples, LanguageModeling/Transformer-XL): a dict per run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ..mistake import Mistake
from .pickles import StandIn, read_pickle
from .source import Dialect, Source, is_state
from .vocabulary import pickled_vocabulary


def read_nvidia(path: Path) -> Source:
    """Read a checkpoint file: its `model_state`, and if present its `model_config` (or `args`) and `vocab`."""
    content = read_pickle(path)
    state = content.get("model_state") if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping) or not is_state(state):
        raise Mistake(f"{path} must be a dict with model_state, as NVIDIA's code saves it. Is it --from original?")
    source = Source(path, Dialect(same_length=1, states_training=True))
    source.add_state(state, _original_name)
    stated_in = "model_config" if "model_config" in content else "args"
    settings = content.get(stated_in)
    settings = settings.attributes if isinstance(settings, StandIn) else settings
    source.state(settings if isinstance(settings, Mapping) else {})
    others = [str(name) for name in content if name not in ("model_state", stated_in, "vocab")]
    source.left_out |= dict.fromkeys(others, "state of the training")
    source.vocab = pickled_vocabulary(content, str(path))
    return source


def _original_name(name: str) -> str:
    name = re.sub(r"crit\.out_layers_weights\.(\d+)", r"crit.out_layers.\1.weight", name)
    return re.sub(r"crit\.out_layers_biases\.(\d+)", r"crit.out_layers.\1.bias", name)
