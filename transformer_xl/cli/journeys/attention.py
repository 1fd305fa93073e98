"""`txl analyse attention`: show the attention of a trained model's heads as pictures, arrays and a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ...analysis.attention import KINDS, TERMS, AverageAttention, Glance, attending_layers, average_attention, glance
from ...analysis.figures import Passage, draw_by_distance, draw_passages
from ...config.settings import Lengths, TransformerXLConfig
from ...data.loader import StreamLoader
from ...data.vocab import Vocab
from ...mistake import Mistake
from ...run import LoadedModel
from ...runtime.terminal import report_progress, show_table
from ..options.analyse import Attention
from .analyse import save_arrays
from .trained import Trained

NAMES = {"a": "(a) content, q·k", "b": "(b) position by content, q·r", "d": "(d) position for all, v·r"}
"""The panels of Figure 7. The arrays also have (c), u·k."""
NOTABLE = 3
"""Number of heads to draw by default: the ones with the greatest mean distance, as in the paper."""
TOP = 0.2
"""Share of the memory that is marked, as in Figure 6."""
Head = tuple[int, int]
"""Layer and head, counted from 0. Output counts them from 1."""


def attention(options: Attention) -> dict[str, Any]:
    """Average the attention of every head over a split, and draw the attention of some heads from some positions.

    Files: pictures, `attention.npz`, and `attention.json`, which names the axes of the arrays.
    """
    trained = Trained(options.folder, options.device, options.precision)
    problems, config, precision = trained.problems, trained.config, trained.precision
    found = trained.lengths(options)
    named = problems.attempt(lambda: [_head(name, config.model) for name in options.heads]) or []
    problems.bound(options, "max_tokens", least=0)
    loaded = trained.load()
    [lengths] = found
    attending_layers(loaded.model)
    text = trained.text(loaded.vocab, options.data, options.split, "valid")
    ids, documents = text.split.ids, text.split.documents
    problems.bound(options, "positions", least=1, most=len(ids) - 1)
    problems.refuse()
    tokens = min(options.max_tokens or len(ids), len(ids))
    positions = options.positions or (tokens // 2,)
    rows = streams_for(tokens, config.eval.batch_size, lengths)
    if tokens // rows <= lengths.mem_len:
        filled = f"{tokens:,} tokens, and the memory has room for {lengths.mem_len:,}"
        print(f"txl: The average is over queries whose memory is not full: it is of {filled}.", file=sys.stderr)
    loader = StreamLoader(text.split, batch_size=rows, tgt_len=lengths.tgt_len, max_tokens=options.max_tokens)
    average = average_attention(loaded.model, report_progress(loader, "averaging"), lengths, precision=precision)
    looks = []
    for position in positions:
        start = 0 if documents is None else int(documents[documents <= position][-1])
        looks.append(glance(loaded.model, ids, position, lengths, precision=precision, start=start))
    chosen = named or average.widest(NOTABLE)
    about = {"run": str(trained.run), **text.about, "queries": average.queries, "precision": precision}
    facts = (
        about
        | {"lengths": asdict(lengths)}
        | _figures(average)
        | {"positions": _token_records(looks, chosen, loaded.vocab)}
    )
    folder = options.out or trained.run / "attention"
    arrays = {"probability": average.probability, "sums": average.sums, "counts": average.counts}
    save_arrays(folder / "attention", facts, arrays | {f"position_{look.position}": look.probability for look in looks})
    paths = _draw(folder, average, chosen, looks, loaded, f"{text.corpus.name}, {text.name}")
    if options.json:
        print(json.dumps(facts | {"files": [str(path) for path in paths]}))
    else:
        _show(average, text.title)
        print(f"Pictures and arrays are in {folder}.")
    return facts


def streams_for(tokens: int, most: int, lengths: Lengths) -> int:
    """The number of streams, at most `most`, that have a full memory for most of their tokens.

    Each begins with an empty one.
    """
    return max(1, min(most, tokens // (4 * lengths.mem_len + lengths.tgt_len)))


def _head(name: str, config: TransformerXLConfig) -> Head:
    every = {f"{n + 1}.{h + 1}": (n, h) for n, h in product(range(config.n_layer), range(config.n_head))}
    if name not in every:
        raise Mistake(f"--heads must be layer.head, from 1.1 to {config.n_layer}.{config.n_head}, got {name!r}.")
    return every[name]


def _figures(average: AverageAttention) -> dict[str, Any]:
    """The statistics of each head, and the axes of the arrays."""
    by_distance = ["kind", "layer", "head", "distance"]
    axes = {"probability": by_distance, "sums": by_distance, "counts": ["distance"]}
    _, layers, heads, _ = average.sums.shape
    each = [
        {
            "head": f"{layer + 1}.{head + 1}",
            "mean_distance_tokens": average.mean_distance[layer, head],
            "beyond_segment": average.beyond_segment[layer, head],
            "entropy_nats": average.entropy[layer, head],
        }
        for layer, head in product(range(layers), range(heads))
    ]
    return {"axes": axes, "kinds": list(KINDS), "heads": each}


def _token_records(looks: Sequence[Glance], chosen: Sequence[Head], vocab: Vocab) -> list[dict[str, Any]]:
    return [
        {
            "position": look.position,
            "array": f"position_{look.position}",
            "axes": ["layer", "head", "token"],
            "tokens": _tokens(vocab, look.ids),
            "top": {f"{n + 1}.{h + 1}": np.flatnonzero(look.top(TOP)[n, h]).tolist() for n, h in chosen},
        }
        for look in looks
    ]


def _tokens(vocab: Vocab, ids: np.ndarray) -> list[str]:
    """Each token as text, a line end as ¶."""
    return ["¶" if i == vocab.line_end else vocab.decode([i]) for i in ids.tolist()]


def _draw(
    folder: Path,
    average: AverageAttention,
    chosen: Sequence[Head],
    looks: Sequence[Glance],
    loaded: LoadedModel,
    text: str,
) -> list[Path]:
    whole, *terms = average.probability
    queries = f"{average.queries:,} queries"
    title = f"{text}: average attention of {queries}; circles are mean distances"
    paths = draw_by_distance(folder / "average", {"": whole}, title, average.mean_distance)
    had = TERMS[loaded.config.model.kind]
    panels = {NAMES[kind]: term for kind, term in zip(KINDS[1:], terms, strict=True) if kind in had and kind in NAMES}
    if len(panels) > 1:
        title = f"{text}: average of each term through its own softmax, {queries}"
        paths += draw_by_distance(folder / "terms", panels, title)
    space = " " if loaded.vocab.unit in ("word", "id") else ""
    for look in looks:
        tokens = [token + space for token in _tokens(loaded.vocab, look.ids)]
        passages = []
        for n, h in chosen:
            probability, marked = look.probability[n, h], look.top(TOP)[n, h]
            share = f"the marked {TOP:.0%} of memory hold {probability[marked].sum():.0%} of its attention"
            passages.append(Passage(f"layer {n + 1}, head {h + 1}: {share}", tokens, probability, marked))
        paths += draw_passages(folder / f"position-{look.position}", passages, f"{text}, from token {look.position:,}")
    return paths


def _show(average: AverageAttention, text: str) -> None:
    rows = []
    for layer, distances in enumerate(average.mean_distance):
        widest = int(distances.argmax())
        figures = [f"{distances.mean():.1f}", f"{layer + 1}.{widest + 1} ({distances[widest]:.1f})"]
        shares = [f"{average.beyond_segment[layer].mean():.1%}", f"{average.entropy[layer].mean():.2f}"]
        rows.append([str(layer + 1), *figures, *shares])
    columns = ["layer", "mean distance", "widest head", "beyond segment", "entropy (nats)"]
    show_table(f"{text}: attention of {average.queries:,} queries", columns, rows)
