"""Transformer-XL (Dai et al., 2019, arXiv:1901.02860) for PyTorch.

Public names are imported at first use (PEP 562), so importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.recipe import load_recipe as load_recipe
    from .config.settings import Lengths as Lengths
    from .config.settings import RunConfig as RunConfig
    from .config.settings import TrainConfig as TrainConfig
    from .config.settings import TransformerXLConfig as TransformerXLConfig
    from .data.datasets import open_corpus as open_corpus
    from .data.loader import StreamLoader as StreamLoader
    from .evaluation.generate import Sampling as Sampling
    from .evaluation.generate import generate as generate
    from .evaluation.language_model import LanguageModel as LanguageModel
    from .evaluation.score import evaluate as evaluate
    from .interop.hub import load_model as load_model
    from .model.attention import sinusoids as sinusoids
    from .model.baselines import build_model as build_model
    from .model.baselines import register as register
    from .model.bidirectional import BidirectionalAttention as BidirectionalAttention
    from .model.memory import Memory as Memory
    from .model.step import VectorStep as VectorStep
    from .model.transformer_xl import TransformerXL as TransformerXL
    from .model.transformer_xl import TransformerXLBackbone as TransformerXLBackbone
    from .run.checkpoint import save_checkpoint as save_checkpoint
    from .train.choices import resolve_settings as resolve_settings
    from .train.loop import fit as fit

    __version__: str

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

__all__ = [*_HOMES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


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
