"""Transformer-XL (Dai et al., 2019, arXiv:1901.02860) for PyTorch.

Public names are imported at first use (PEP 562), so importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.recipe import load_recipe
    from .config.settings import Lengths, RunConfig, TrainConfig, TransformerXLConfig
    from .data.datasets import open_corpus
    from .data.loader import StreamLoader
    from .evaluation.generate import Sampling, generate
    from .evaluation.language_model import LanguageModel
    from .evaluation.score import evaluate
    from .interop.hub import load_model
    from .model.attention import sinusoids
    from .model.baselines import build_model, register
    from .model.bidirectional import BidirectionalAttention
    from .model.memory import Memory
    from .model.step import VectorStep
    from .model.transformer_xl import TransformerXL, TransformerXLBackbone
    from .run.checkpoint import save_checkpoint
    from .train.choices import resolve_settings
    from .train.loop import fit

    __version__: str

__all__ = [
    "BidirectionalAttention",
    "LanguageModel",
    "Lengths",
    "Memory",
    "RunConfig",
    "Sampling",
    "StreamLoader",
    "TrainConfig",
    "TransformerXL",
    "TransformerXLBackbone",
    "TransformerXLConfig",
    "VectorStep",
    "__version__",
    "build_model",
    "evaluate",
    "fit",
    "generate",
    "load_model",
    "load_recipe",
    "open_corpus",
    "register",
    "resolve_settings",
    "save_checkpoint",
    "sinusoids",
]

_HOMES = {
    "TransformerXL": "model.transformer_xl",
    "TransformerXLBackbone": "model.transformer_xl",
    "TransformerXLConfig": "config.shape",
    "BidirectionalAttention": "model.bidirectional",
    "Lengths": "config.settings",
    "Memory": "model.memory",
    "VectorStep": "model.step",
    "build_model": "model.baselines",
    "register": "model.baselines",
    "load_model": "interop.hub",
    "LanguageModel": "evaluation.language_model",
    "load_recipe": "config.recipe",
    "open_corpus": "data.datasets",
    "resolve_settings": "train.choices",
    "fit": "train.loop",
    "evaluate": "evaluation.score",
    "generate": "evaluation.generate",
    "RunConfig": "config.settings",
    "TrainConfig": "config.settings",
    "sinusoids": "model.attention",
    "Sampling": "evaluation.generate",
    "StreamLoader": "data.loader",
    "save_checkpoint": "run.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value = version("transformer-xl")
    elif name in _HOMES:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    else:
        raise AttributeError(f"module 'transformer_xl' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
