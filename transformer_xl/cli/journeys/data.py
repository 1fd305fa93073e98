"""`txl data NAME`: convert a published corpus, downloaded or from a local copy, to a token store."""

from __future__ import annotations

from ...data.corpora.preparing import prepare
from ...runtime.terminal import show_table
from ..options.train import Data


def data(options: Data) -> None:
    """Prepare a corpus, by default with the published treatment of line ends, and print its counts."""
    how = {"newlines": options.newlines, "partial": options.partial, "vocab_file": options.vocab}
    corpus = prepare(options.name, options.source, **how)
    rows = []
    for name, split in corpus.header.splits.items():
        targets = split.tokens - len(split.documents or [0])
        rows.append([name, *(f"{n:,}" for n in (split.tokens, targets, split.types, split.unknown, split.bytes))])
    title = f"{corpus.name}: {corpus.vocab}, in {corpus.path}"
    if corpus.header.partial:
        title += f"\nPartial: {corpus.header.partial}."
    show_table(title, ["split", "tokens", "targets", "types", "unknown", "bytes of text"], rows)
