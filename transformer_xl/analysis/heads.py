"""What `txl analyse attention` writes about heads: their statistics, and the pictures of Figures 5 to 7."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

from ..data.vocab import Vocab
from ..run.checkpoint import LoadedModel
from .attention import KINDS, TERMS, TOP, AverageAttention, Head, PositionAttention, most_attended
from .figures import draw_by_distance, draw_targets

PANELS = {"a": "(a) content, q·k", "b": "(b) position by content, q·r", "d": "(d) position for all, v·r"}
"""The panels of Figure 7. The arrays also have (c), u·k."""


def head_facts(average: AverageAttention) -> dict[str, object]:
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


def passage_facts(looks: Sequence[PositionAttention], chosen: Sequence[Head], vocab: Vocab) -> list[dict[str, object]]:
    """For each position: the tokens it sees, those with the most attention per chosen head, and its array's name."""
    return [
        {
            "position": look.position,
            "array": f"position_{look.position}",
            "axes": ["layer", "head", "token"],
            "tokens": _tokens(vocab, look.ids),
            "top": {f"{n + 1}.{h + 1}": np.flatnonzero(look.top()[n, h]).tolist() for n, h in chosen},
        }
        for look in looks
    ]


def _tokens(vocab: Vocab, ids: np.ndarray) -> list[str]:
    """Each token as text, a line end as ¶."""
    return ["¶" if i == vocab.line_end else vocab.decode([i]) for i in ids.tolist()]


def draw_heads(
    folder: Path,
    average: AverageAttention,
    chosen: Sequence[Head],
    looks: Sequence[PositionAttention],
    loaded: LoadedModel,
    text: str,
) -> list[Path]:
    """Draw the average attention, its terms and the attention of the chosen heads; return the files."""
    for old in (*folder.glob("terms.[ps][nv]g"), *folder.glob("targets-[0-9]*.[ps][nv]g")):
        old.unlink()  # of an earlier call, whose arrays are replaced
    whole, *terms = average.probability
    queries = f"{average.queries:,} queries"
    title = f"{text}: average attention of {queries}; circles are mean distances"
    paths = draw_by_distance(folder / "average", {"": whole}, title, average.mean_distance)
    had = TERMS[loaded.config.model.kind]
    panels = {PANELS[kind]: term for kind, term in zip(KINDS[1:], terms, strict=True) if kind in had and kind in PANELS}
    if len(panels) > 1:
        title = f"{text}: average of each term through its own softmax, {queries}"
        paths += draw_by_distance(folder / "terms", panels, title)
    for look in looks:
        if look.to_memory.size:
            texts = (_tokens(loaded.vocab, ids) for ids in (look.targets, look.ids[:-1]))
            rows, columns = ([text.replace(" ", "\N{OPEN BOX}") for text in each] for each in texts)  # alone on a tick
            panels = {f"layer {n + 1}, head {h + 1}": look.to_memory[n, h] for n, h in chosen}
            dots = [most_attended(panel) for panel in panels.values()]
            title = f"{text}, from token {look.position:,}: attention to the memory, each row's top {TOP:.0%} marked"
            paths += draw_targets(folder / f"targets-{look.position}", rows, columns, panels, dots, title)
    return paths
