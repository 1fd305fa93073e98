"""`txl analyse attention`: the attention of a trained model's heads as pictures, arrays and a table: Figures 5 to 7."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from ..config.settings import TransformerXLConfig
from ..mistake import Mistake
from ..runtime.terminal import report_progress, show_table
from .shared import Folder, Part, Precision, RunFolder, Size, Sizes, TextPath, check_folder, open_run

if TYPE_CHECKING:
    from ..analysis.attention import AverageAttention, Head

NOTABLE = 3
"""Number of heads to draw by default: the ones with the greatest mean distance, as in the paper."""
TARGETS = 16
"""Number of tokens, from a position on, whose attention to the memory is drawn side by side."""


@dataclass(frozen=True)
class Attention:
    """Draw the attention of each head: by distance, from chosen positions, and by term. Figures 5 to 7."""

    folder: RunFolder
    data: TextPath = None
    """Read this text instead of the run's. It is tokenised with the run's vocabulary."""
    split: Part | None = None
    """The split to read. By default valid, or all if --data has no splits. all: every split, one after another."""
    max_tokens: int = 0
    """Average over at most this many tokens; 0: all."""
    tgt_len: Size = None
    mem_len: Size = None
    heads: Annotated[tuple[str, ...], arg(metavar="LAYER.HEAD ...")] = ()
    """Heads to draw, counted from 1; by default the three with the greatest mean distance."""
    positions: Sizes = ()
    """Save the attention of these positions, from 1 (0 is the first token, which sees only itself), and draw it for a
    run with a memory; by default of the middle one."""
    out: Folder = None
    """The folder for the pictures; by default RUN/attention."""
    device: str = "auto"
    precision: Precision = "auto"
    json: bool = False

    def run(self) -> None:
        """Files: pictures, `attention.npz`, and `attention.json`, which names the axes of the arrays."""
        from ..analysis import attention, figures
        from ..evaluation.score import segments_of

        trained = open_run(self.folder, self.device, self.precision)
        problems, config, precision = trained.problems, trained.config, trained.precision
        found = trained.lengths(self)
        named = problems.attempt(lambda: [_head(name, config.model) for name in self.heads]) or []
        problems.bound(self, "max_tokens", least=0)
        check_folder(self.out, problems)
        loaded = trained.load()
        [lengths] = found
        attention.attending_layers(loaded.model)
        split = trained.text(loaded.vocab, self.data, self.split, "valid")
        ids, documents = split.ids, split.starts(config.model.document_end)
        problems.bound(self, "positions", least=1, most=len(ids) - 1)
        problems.refuse()
        tokens = min(self.max_tokens or len(ids), len(ids))
        positions = self.positions or (max(tokens // 2, 1),)
        # Each stream begins with an empty memory: there are few enough that it is full for most tokens.
        rows = max(1, min(config.eval.batch_size, tokens // (4 * lengths.mem_len + lengths.tgt_len)))
        again = config.context_len(lengths)
        how = replace(config.eval, batch_size=rows, max_tokens=self.max_tokens)
        segments = report_progress(segments_of(loaded, split, lengths, how), "averaging")
        average = attention.average_attention(loaded.model, segments, lengths, context_len=again, precision=precision)
        trained.refuse_diverged(average.sums, average.entropy)
        looks = []
        for position in positions:
            start = int(documents[documents <= position].max())
            end = min([len(ids), *documents[documents > position].tolist()])
            count = min(TARGETS, end - position) if lengths.mem_len else 1
            see = partial(attention.position_attention, count=count, context_len=again, start=start)
            looks.append(see(loaded.model, ids, position, lengths, precision=precision))
        chosen = named or average.widest(NOTABLE)
        facts: dict[str, object] = {"run": str(trained.path), **split.about, "queries": average.queries}
        facts |= {"precision": precision, "lengths": asdict(lengths), **figures.head_facts(average)}
        facts["positions"] = figures.passage_facts(looks, chosen, loaded.vocab)
        folder = self.out or trained.path / "attention"
        arrays = {"probability": average.probability, "sums": average.sums, "counts": average.counts}
        arrays |= {f"position_{look.position}": look.probability for look in looks}
        figures.save_arrays(folder / "attention", facts, arrays)
        title = f"{split.corpus}, {split.name}"
        paths = figures.if_possible(lambda: figures.draw_heads(folder, average, chosen, looks, loaded, title))
        if self.json:
            print(json.dumps(facts | {"files": [str(path) for path in paths]}))
        else:
            _show(average, split.title)
            print(f"{'Pictures and arrays' if paths else 'Arrays'} are in {folder}.")


def _head(name: str, config: TransformerXLConfig) -> Head:
    every = {f"{n + 1}.{h + 1}": (n, h) for n, h in product(range(config.n_layer), range(config.n_head))}
    if name not in every:
        raise Mistake(f"--heads must be layer.head, from 1.1 to {config.n_layer}.{config.n_head}, got {name!r}.")
    return every[name]


def _show(average: AverageAttention, text: str) -> None:
    rows = []
    for layer, distances in enumerate(average.mean_distance):
        widest = int(distances.argmax())
        figures = [f"{distances.mean():.1f}", f"{layer + 1}.{widest + 1} ({distances[widest]:.1f})"]
        shares = [f"{average.beyond_segment[layer].mean():.1%}", f"{average.entropy[layer].mean():.2f}"]
        rows.append([str(layer + 1), *figures, *shares])
    columns = ["layer", "mean distance", "widest head", "beyond segment", "entropy (nats)"]
    show_table(f"{text}: attention of {average.queries:,} queries", columns, rows)
