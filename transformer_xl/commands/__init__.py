"""Every command of `txl` in a file of its name: a dataclass whose fields are its options and whose `run` does it.

What needs torch is imported inside the functions, so help and mistakes take no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

COMMANDS = {
    "demo": "train a small model in minutes, score it and generate text; needs no network and no data",
    "data": "prepare a published corpus, or list the corpora",
    "recipes": "list the recipes: model, data, parameters, steps, results",
    "train": "train with a recipe, or on your text, then score the best checkpoint",
    "eval": "score a text with a trained model, at one or many lengths",
    "score": "print the log-probability, perplexity and bits of each line of a file",
    "generate": "generate text and print it token by token",
    "serve": "answer requests over HTTP, and show a page to read and write texts",
    "analyse": "make the paper's tables and figures from trained models: recl, length, attention",
    "paper": "list the paper's tables and figures, or make one: train, measure and print beside the paper's",
    "report": "write one HTML page about a run, or about several runs side by side",
    "convert": "import and export checkpoints of other programs",
    "env": "print the hardware and versions of this machine, and what `auto` chooses on it",
}
"""The name of each command, and what it does."""


def command_class(name: str) -> Any:
    """The dataclass of a command."""
    return getattr(import_module(f".{name}", __name__), name.capitalize())
