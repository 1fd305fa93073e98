"""`txl data NAME`: a published corpus, downloaded or from a local copy, to a token store."""

from __future__ import annotations

from pathlib import Path

from ...data.corpora.preparing import prepare
from ...data.corpus import Corpus
from ...data.vocab import Newlines
from ...runtime.terminal import show_table


def data(
    name: str,
    source: Path | None = None,
    *,
    newlines: Newlines | None = None,
    partial: bool = False,
    vocab_file: Path | None = None,
) -> None:
    """Prepare a corpus, by default with the published treatment of line ends, and print what it holds."""
    show_corpus(prepare(name, source, newlines=newlines, partial=partial, vocab_file=vocab_file))


def show_corpus(corpus: Corpus) -> None:
    header = corpus.header
    rows = []
    for name, split in header.splits.items():
        targets = split.tokens - len(split.documents or [0])
        rows.append([name, *(f"{n:,}" for n in (split.tokens, targets, split.types, split.unknown, split.bytes))])
    title = f"{header.name}: {corpus.vocab}, in {corpus.path}"
    if header.partial:
        title += f"\nPartial: {header.partial}."
    show_table(title, ["split", "tokens", "targets", "types", "unknown", "bytes of text"], rows)
