"""torch.compile in training: for full segments after a full memory, or with random lengths for all.

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
from ..config.shape import RECURRENT, TransformerXLConfig
from ..data.loader import Segment
from ..model.memory import Memory
from ..model.transformer_xl import TransformerXL
from .objective import Objective


def compile_objective(objective: Objective, config: TrainConfig) -> None:
    """Compile the objective, for its calls inside `compiled`."""
    # PyTorch would warn in each step of operators without a deterministic form; a filter of each step forgets others.
    warnings.filterwarnings("ignore", message=".*deterministic")
    with_progress = type(objective.model).training_nll is not TransformerXL.training_nll  # a number of each step
    # The sizes of a softmax's bands differ in each step, too.
    varies = config.random_tgt_len or with_progress or objective.model.config.cutoffs
    objective.compile(dynamic=None if varies else False)


def is_usual(segment: Segment, memory: Memory, config: TrainConfig, model: TransformerXLConfig) -> bool:
    """Whether the compiler's code is for such a step. With random lengths it is for all."""
    full = model.base_kind in RECURRENT or memory.length == config.mem_len
    return config.random_tgt_len or (full and segment.ids.shape[1] == config.tgt_len + config.context_len)


@contextmanager
def compiled(*, usual: bool) -> Iterator[None]:
    """Inside, compiled code runs if the step is `usual`, with the same bits in every process; otherwise none runs, also
    of other functions.

    Sums are not by atomic additions then, and no choice depends on a measured time (seen on CPUs; no GPU has run it).
    """
    from torch._inductor import config as inductor  # slow to import

    flags: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), flags.fill_uninitialized_memory
    if usual:
        flags.fill_uninitialized_memory = False  # it costs time
        torch.set_deterministic_debug_mode(max(mode, 1))
    try:
        # The mode sets the compiler's too, but not for the first code of a process, and it stays.
        with torch.compiler.set_stance("default" if usual else "force_eager"), inductor.patch(deterministic=usual):
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        flags.fill_uninitialized_memory = fill
