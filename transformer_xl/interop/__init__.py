"""Convert checkpoints of other programs: the authors' code (PyTorch, TensorFlow), Hugging Face's and NVIDIA's."""

from .hub import load_model, local
from .original import write_original
from .reading import Imported, check_vocabulary, read_model
from .source import PROGRAMS, Program
from .vocabulary import read_vocabulary

__all__ = [
    "PROGRAMS",
    "Imported",
    "Program",
    "check_vocabulary",
    "load_model",
    "local",
    "read_model",
    "read_vocabulary",
    "write_original",
]
