"""torch.compile in training, for the segments and memories of the usual lengths.

The compiler takes minutes. For a second length it would take them again, and make slower code that fits any length. An
epoch begins with short memories and ends with a short segment; these steps run as they do without the compiler.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..config.settings import TrainConfig
from ..data.loader import Segment
from ..model.memory import Memory
from ..model.transformer_xl import TransformerXL
from .objective import Objective


def compile_objective(objective: Objective, config: TrainConfig) -> None:
    """Compile the objective, for its calls inside `compiled`."""
    warnings.filterwarnings("ignore", message=".*deterministic")  # of operators that always add in one order here
    with_progress = type(objective.model).training_nll is not TransformerXL.training_nll  # a number of each step
    objective.compile(dynamic=None if config.random_tgt_len or with_progress else False)


def is_usual(segment: Segment, memory: Memory, config: TrainConfig) -> bool:
    """Whether the compiler's code is for such a step. With random lengths it is for all."""
    whole = config.tgt_len + config.context_len, config.mem_len
    return config.random_tgt_len or (segment.ids.shape[1], memory.length) == whole


@contextmanager
def compiled(*, usual: bool) -> Iterator[None]:
    """Inside, the objective's compiled code runs if the step is `usual`, with the same bits in every process.

    Sums are not by atomic additions then, and no choice depends on a measured time.
    """
    flags: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), flags.fill_uninitialized_memory
    if usual:
        flags.fill_uninitialized_memory = False  # it costs time
        torch.set_deterministic_debug_mode("warn")
    try:
        with torch.compiler.set_stance("default" if usual else "force_eager"):
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        flags.fill_uninitialized_memory = fill
