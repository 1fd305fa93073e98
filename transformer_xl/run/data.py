"""`txl data NAME --source PATH`: a published corpus from a local copy to a token store."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from transformer_xl.data.corpus import Corpus
from transformer_xl.data.datasets import DATASETS, prepare

from .show import show_table


def data(name: str, source: Path, *, newlines: Literal["drop", "keep"] | None = None) -> None:
    """Prepare a corpus, by default with the published treatment of line ends, and print what it holds."""
    protocols = DATASETS[name].protocols if name in DATASETS else ("keep",)
    show_corpus(prepare(name, source, newlines=newlines or next(iter(protocols))))


def show_corpus(corpus: Corpus) -> None:
    header = corpus.header
    rows = [
        [name, f"{split.tokens:,}", f"{split.types:,}", f"{split.unknown:,}", f"{split.bytes:,}"]
        for name, split in header.splits.items()
    ]
    title = f"{header.name}: {corpus.vocab}, in {corpus.path}"
    show_table(title, ["split", "tokens", "types", "unknown", "bytes of text"], rows)
