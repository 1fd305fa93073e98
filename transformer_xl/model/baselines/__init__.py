"""The paper's baselines, with the calls of `TransformerXL`: state in, state out."""

from __future__ import annotations

from ...config.settings import TransformerXLConfig
from ..transformer_xl import TransformerXL
from .absolute import AlRfou, Vaswani
from .recurrent import LSTM, QRNN
from .shaw import Shaw

__all__ = ["build_model"]


def build_model(config: TransformerXLConfig, *, backend: str = "auto", recompute: bool = False) -> TransformerXL:
    """The model that `config.kind` names, with weights as at the start of training."""
    return _KINDS[config.kind](config, backend=backend, recompute=recompute)


_KINDS: dict[str, type[TransformerXL]] = {
    "transformer-xl": TransformerXL,
    "shaw": Shaw,
    "vaswani": Vaswani,
    "al-rfou": AlRfou,
    "lstm": LSTM,
    "qrnn": QRNN,
}
