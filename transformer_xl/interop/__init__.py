"""Convert checkpoints of other programs: the authors' code (PyTorch, TensorFlow), Hugging Face's and NVIDIA's."""

from .hub import load_model, local
from .reading import Imported, Program, read_model
from .vocabulary import read_vocabulary

__all__ = [
    "Imported",
    "Program",
    "load_model",
    "local",
    "read_model",
    "read_vocabulary",
]
