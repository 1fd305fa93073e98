"""What a run has measured, for tests that compare runs."""

from __future__ import annotations

from pathlib import Path

from transformer_xl.train.metric_log import read_metrics

CLOCK = {"seconds", "tokens_per_second"}


def without_clock(run: Path) -> list[dict]:
    """The entries of a run's metrics file, but for what a clock says."""
    return [{k: v for k, v in entry.items() if k not in CLOCK} for entry in read_metrics(run / "metrics.jsonl")]
