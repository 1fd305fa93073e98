"""The content of another program's checkpoint, by the original PyTorch code's names, and how the program differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..config.settings import RunConfig
from ..data.vocab import Vocab
from ..mistake import Mistake, shortened
from ..runtime.files import read_table


@dataclass
class Source:
    """The arrays and the stated settings of a checkpoint, before they are compared with each other; and the differences
    between its program and the authors' PyTorch code that the weights do not show."""

    path: Path
    zero_memory: bool = False
    """A stream begins with `mem_len` zeros that are attended."""
    clusters_reversed: bool = True
    """Band i has the i-th last of the head's cluster columns, not the i-th. `add` puts them in order."""
    same_length: int = 0
    """With `same_length`, a query attends to `mem_len` keys plus this number."""
    keeps_ties: bool = False
    """A tied array is stored under each of its names."""
    states_training: bool = False
    """The stated lengths are for training, not for evaluation."""
    arrays: dict[str, Tensor] = field(default_factory=dict)
    """The arrays by the original's parameter names, in PyTorch's layout."""
    spelled: dict[str, str] = field(default_factory=dict)
    """The source's own names of these arrays. Arrays that this package added have none."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Names in the source that do not become weights, and the reasons."""
    stated: dict[str, Any] = field(default_factory=dict)
    """The hyper-parameters that it states, by the original's names."""
    vocab: Vocab | None = None
    run: RunConfig | None = None
    """The settings, if the source is an export of this package."""
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, canonical: str, array: Tensor) -> None:
        """Add an array of the source under the original's name.

        Raises:
            ValueError: the array cannot become a weight, or another array has the same name.
        """
        if canonical in self.arrays:
            twice = f"{self.spelling(canonical)} and {shortened(name)}"
            raise Mistake(f"{self.path} must hold {canonical} once, and has {twice}.")
        kinds = torch.float16, torch.bfloat16, torch.float32, torch.float64
        plain = array.layout == torch.strided and not array.is_meta
        if array.dtype not in kinds or not plain or not array.numel():
            kind = f"{array.numel()} numbers of {str(array.dtype).removeprefix('torch.')}"
            kind += "" if plain else ", not stored one by one"
            raise Mistake(f"{self.path} must hold fractions, and {shortened(name)} has {kind}.")
        reverse = self.clusters_reversed and canonical in ("crit.cluster_weight", "crit.cluster_bias")
        self.arrays[canonical] = array.flip(0) if reverse and array.ndim else array
        self.spelled[canonical] = name

    def add_arrays(self, state: Mapping[str, Tensor], original: Callable[[str], str] = str) -> None:
        """Add a state dict. `original` converts its names to the original's."""
        for name, array in state.items():
            canonical = original(name)
            if canonical == "pos_emb.inv_freq":
                self.left_out[name] = "computed here"
            else:
                self.add(name, canonical, array)

    def add_settings(self, settings: Mapping[str, object]) -> None:
        """Add hyper-parameters that the source states; null is ignored."""
        self.stated |= {str(name): value for name, value in settings.items() if value is not None}

    def add_settings_beside(self, folder: Path) -> None:
        """Add the hyper-parameters in the JSON files of a folder, including `corpus-info.json`."""
        for file in sorted(folder.glob("*.json")):
            self.add_settings(read_table(file, "Get it again, or move it away."))

    def spelling(self, canonical: str) -> str:
        """The source's name of an array, or the original's name if it has none."""
        return shortened(self.spelled.get(canonical, canonical))


def is_state(content: object) -> TypeGuard[Mapping[str, Tensor]]:
    """Whether `content` is a state dict: tensors by name."""
    if not isinstance(content, Mapping) or not content:
        return False
    return all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items())
