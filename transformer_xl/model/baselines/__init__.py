"""The paper's baselines: other backbones with the calls of `TransformerXL`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ...config.settings import TransformerXLConfig
from ..transformer_xl import TransformerXL, TransformerXLBackbone
from .absolute import AlRfou, Auxiliary, Vaswani
from .recurrent import Recurrent
from .shaw import Shaw

__all__ = ["Auxiliary", "build_model"]

_BACKBONES: dict[str, Callable[..., nn.Module]] = {
    "transformer-xl": TransformerXLBackbone,
    "shaw": Shaw,
    "vaswani": Vaswani,
    "al-rfou": AlRfou,
    "lstm": Recurrent,
    "qrnn": Recurrent,
}


def build_model(config: TransformerXLConfig, *, backend: str = "auto", recompute: bool = False) -> TransformerXL:
    """The model that `config.kind` names, with weights as at the start of training."""
    kind = Auxiliary if config.intermediate_losses or config.multiple_targets else TransformerXL
    return kind(config, backend=backend, recompute=recompute, backbone=_BACKBONES[config.kind])
