"""The test figures of the Transformer-XL paper (Dai et al., ACL 2019, Tables 1-5), to compare with a run's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TABLES: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "wikitext-103": (("standard (Table 1)", "151M", "24.0", "ppl"), ("large (Table 1)", "257M", "18.3", "ppl")),
    "enwik8": (
        ("12 layers (Table 2)", "41M", "1.06", "bpc"),
        ("18 layers (Table 2)", "88M", "1.03", "bpc"),
        ("24 layers (Table 2)", "277M", "0.99", "bpc"),
    ),
    "text8": (("24 layers (Table 3)", "277M", "1.08", "bpc"),),
    "lm1b": (("base (Table 4)", "0.46B", "23.5", "ppl"), ("large (Table 4)", "0.8B", "21.8", "ppl")),
    "ptb": (("16 layers (Table 5)", "24M", "54.52", "ppl"),),
}
"""The rows of each corpus: model, parameters as the paper rounds them, test figure, and its unit."""


def corpus_name(config: Mapping[str, Any]) -> str:
    """The published corpus that a run's settings name."""
    return str(config.get("corpus", {}).get("name", "")).partition("+")[0]
