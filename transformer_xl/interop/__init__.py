"""Convert checkpoints of other programs: the authors' code (PyTorch, TensorFlow), Hugging Face's and NVIDIA's."""

from .hub import load_model, local
from .reading import Imported, read_model
from .source import PROGRAMS, Program
from .vocabulary import read_vocabulary

__all__ = [
    "PROGRAMS",
    "Imported",
    "Program",
    "load_model",
    "local",
    "read_model",
    "read_vocabulary",
]
