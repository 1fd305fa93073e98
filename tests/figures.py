"""What a run has measured, for tests that compare runs."""

from __future__ import annotations

from pathlib import Path

from transformer_xl.run.metrics import Metrics

CLOCK = {"seconds", "tokens_per_second"}


def without_clock(run: Path) -> list[dict]:
    """The entries of a run's metrics file, but for what a clock says."""
    return [{k: v for k, v in entry.items() if k not in CLOCK} for entry in Metrics(run / "metrics.jsonl").entries()]
