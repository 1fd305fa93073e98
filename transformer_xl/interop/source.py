"""What a foreign checkpoint holds, under the names of the original PyTorch code, and what its program means by it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from transformer_xl.data.vocab import Vocab
from transformer_xl.settings import RunConfig

Program = Literal["original", "tensorflow", "huggingface", "nvidia"]
PROGRAMS: tuple[Program, ...] = get_args(Program)


@dataclass(frozen=True)
class Dialect:
    """Where a program differs from the original PyTorch code although the weights look the same."""

    layer_norm_epsilon: float = 1e-5
    zero_memory: bool = False
    """A stream starts with mem_len zeros that are attended."""
    clusters_reversed: bool = True
    """The head's column of band i is the i-th from the end; else the bands stand in their order."""
    same_length: int = 0
    """Under `same_length` a query sees so many keys more than mem_len."""


DIALECTS: Mapping[Program, Dialect] = {
    "original": Dialect(),
    "tensorflow": Dialect(layer_norm_epsilon=1e-12, zero_memory=True, clusters_reversed=False, same_length=1),
    "huggingface": Dialect(zero_memory=True, clusters_reversed=False),
    "nvidia": Dialect(same_length=1),
}


@dataclass
class Source:
    """Arrays and statements of one checkpoint; nothing of it is believed yet."""

    path: Path
    program: Program
    arrays: dict[str, Tensor] = field(default_factory=dict)
    """By the original's parameter names, in PyTorch's layout."""
    spelled: dict[str, str] = field(default_factory=dict)
    """How the source spells those names."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Names of the source that no weight is made of, and why."""
    stated: dict[str, Any] = field(default_factory=dict)
    """Hyper-parameters it gives, by the original's names."""
    vocab: Vocab | None = None
    run: RunConfig | None = None
    """Its settings, where it is an export of ours."""
    notes: list[str] = field(default_factory=list)

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.program]

    def add(self, name: str, canonical: str, array: Tensor) -> None:
        """Take an array of the source under the original's name."""
        self.arrays[canonical] = array
        self.spelled[canonical] = name

    def spelling(self, canonical: str) -> str:
        """A name as the source spells it; the original's where it has none."""
        return self.spelled.get(canonical, canonical)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FileNotFoundError, ValueError: a sentence for a file that is missing, damaged or of another kind.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing. Get the whole folder.")
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, and is damaged ({error}). Get it again, or move it away.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, and holds a {type(content).__name__}. Move it away.")
    return content
