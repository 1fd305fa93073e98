"""Transformer-XL (Dai et al., 2019, arXiv:1901.02860) for PyTorch.

Public names are imported at first use (PEP 562), so importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.settings import Lengths, TransformerXLConfig
    from .interop import load_model
    from .model.memory import Memory
    from .model.transformer_xl import TransformerXL, TransformerXLBackbone

    __version__: str

__all__ = [
    "Lengths",
    "Memory",
    "TransformerXL",
    "TransformerXLBackbone",
    "TransformerXLConfig",
    "__version__",
    "load_model",
]

_HOMES = {
    "TransformerXL": "model.transformer_xl",
    "TransformerXLBackbone": "model.transformer_xl",
    "TransformerXLConfig": "config.settings",
    "Lengths": "config.settings",
    "Memory": "model.memory",
    "load_model": "interop",
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
