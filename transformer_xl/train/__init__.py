"""Training: one step as a function, its state, and the loop that measures, saves and resumes."""

from __future__ import annotations

from .choices import choices, resolve_settings
from .loop import fit
from .step import MOST_SKIPPED, Trainer, train_step, trained_targets

__all__ = [
    "MOST_SKIPPED",
    "Trainer",
    "choices",
    "fit",
    "resolve_settings",
    "train_step",
    "trained_targets",
]
