"""`txl data`: list the published corpora. `txl data NAME`: convert one, downloaded or local, to a token store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..mistake import Mistake
from ..runtime.files import below_home
from ..runtime.terminal import show_table


@dataclass(frozen=True)
class Data:
    """Prepare a published corpus: download it, or read a local copy. Without a name, list the corpora."""

    name: Annotated[Positional[str | None], arg(metavar="NAME")] = None
    """enwik8, text8, ptb, ptb-char, wikitext-2, wikitext-2-raw, wikitext-103 or lm1b."""
    source: Annotated[Path | None, arg(metavar="PATH")] = None
    """A local copy: a folder with the published files (or compressed ones), an archive, or a single file."""
    newlines: Literal["drop", "keep"] | None = None
    """Line ends of enwik8. drop: remove them, as the published protocol does (default); keep: keep every byte."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> None:
        from ..data.corpora.preparing import prepare
        from ..data.corpora.published import DATASETS

        if self.name is None:
            given = [f"--{name}" for name in ("source", "newlines") if getattr(self, name)]
            if given:
                raise Mistake(f"NAME must be given with {', '.join(given)}: one of {', '.join(DATASETS)}.")
            list_corpora(as_json=self.json)
            return
        corpus = prepare(self.name, self.source, newlines=self.newlines)
        if self.json:
            print(json.dumps(corpus_facts(corpus.name, corpus.path)))
            return
        rows = []
        for name, split in corpus.header.splits.items():
            targets = split.tokens - len(split.documents or [0])
            rows.append([name, *(f"{n:,}" for n in (split.tokens, targets, split.types, split.unknown, split.bytes))])
        title = f"{corpus.name}: {corpus.vocab}, in {corpus.path}"
        show_table(title, ["split", "tokens", "targets", "types", "unknown", "bytes of text"], rows)


def list_corpora(*, as_json: bool) -> None:
    """Print a row for each published corpus, and for each store with other words or line ends."""
    from ..data.corpora.published import DATASETS
    from ..data.corpus import SPLITS
    from ..data.datasets import store_folder

    folder = store_folder("x").parent
    others = sorted(file.parent.name for file in folder.glob("*/corpus.json") if file.parent.name not in DATASETS)
    entries = [corpus_facts(name, folder / name) for name in (*DATASETS, *others)]
    if as_json:
        print(json.dumps({"folder": str(folder), "corpora": entries}))
        return
    rows = []
    for entry in entries:
        store = _megabytes(entry["store_bytes"]) if entry["prepared"] == "yes" else entry["prepared"]
        tokens = ["-" if number is None else f"{number:,}" for number in entry["tokens"].values()]
        rows.append([entry["name"], entry["unit"], *tokens, _megabytes(entry["download_bytes"]), store])
    title = (
        f"`txl data NAME` downloads a corpus and prepares it in {below_home(folder)}; --source PATH reads a local copy."
    )
    show_table(title, ["corpus", "unit", *SPLITS, "download, MB", "prepared, MB"], rows)


def corpus_facts(name: str, store: Path) -> dict[str, Any]:
    """The facts of a published corpus, or of its store if it is prepared. A number that is not published is None."""
    from ..data.corpora.published import DATASETS
    from ..data.corpus import SPLITS, Header

    header, prepared, published = None, "no", DATASETS.get(name)
    if (store / "corpus.json").exists():
        try:
            header, prepared = Header.read(store / "corpus.json"), "yes"
        except Mistake:
            prepared = "damaged"
    counts: Mapping[str, int] = {}
    unit = ""
    if header:
        counts, unit = header.counts, header.unit
    elif published:
        counts, unit = published.protocols[published.newlines], published.unit
    files = store.iterdir() if header else ()
    downloads = published.downloads if published else ()
    sizes = [next((origin.bytes for origin in origins if origin.bytes), 0) for origins in downloads]
    return {
        "name": name,
        "unit": unit,
        "tokens": {split: counts.get(f"tokens in {split}") for split in SPLITS},
        "download_bytes": sum(sizes) or None,
        "prepared": prepared,
        "store": str(store) if header else "",
        "store_bytes": sum(file.stat().st_size for file in files),
        "command": f"txl data {name}" if published else "",
    }


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:,.1f}"
