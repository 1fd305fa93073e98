"""The figures of a page that need the model: cost by memory length, and texts token by token.

`report.json` in the run's folder keeps them with the checkpoint that they are of, so the page needs no model. Figures
of another checkpoint than the run's best are computed again.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypedDict

from jaxtyping import Float
from torch import Tensor

from ..config.shape import RECURRENT
from ..data.corpus import Split
from ..data.loader import Segment
from ..data.vocab import Vocab
from ..evaluation.generate import TokenText
from ..evaluation.score import evaluate, score_split, segments_of
from ..mistake import Mistake
from ..run.checkpoint import LoadedModel
from ..run.folder import find_checkpoint
from ..run.trained import TrainedRun
from ..runtime.files import SEAL, digest_of, digest_of_json, read_table, write_whole

FILE = "report.json"
TARGETS = 10_000
"""Number of targets to score at each memory length."""
READ = 400
"""Number of tokens of the passage from the split."""
CONTEXT = 4096
"""Maximum number of tokens to read before the passage, to fill the memory."""


class Cost(TypedDict):
    """What the targets cost with one memory length."""

    mem_len: int
    loss: float
    targets: int


class Passage(TypedDict):
    """A part of the split, and what each token costs the model."""

    start: int
    """The number of tokens of the split before the first."""
    texts: Sequence[str]
    nats: Sequence[float | None]
    """None for the first token of a document."""


class Figures(TypedDict):
    """What `report.json` holds."""

    checkpoint: str
    """The `identity` of the checkpoint."""
    split: str
    costs: list[Cost]
    """For the same targets, the shortest memory first."""
    passage: Passage


def identity(folder: Path) -> str:
    """The name of a checkpoint, and a checksum of its files, or of its weights if no checksums are stored."""
    sums = folder / SEAL
    return f"{folder.name} {digest_of(sums if sums.exists() else folder / 'model.safetensors')}"


def stored_figures(run: Path) -> Figures | None:
    """The stored figures of the run's best checkpoint; None if there are none."""
    try:
        stored = read_table(run / FILE, "")
    except (FileNotFoundError, Mistake):  # they are computed, or computed again
        return None
    figures: Figures = stored.get("figures", {})
    sound = stored.get("sum") == digest_of_json(figures) and figures["checkpoint"] == identity(find_checkpoint(run))
    return figures if sound else None


def complete_figures(run: Path, device: str = "auto") -> None:
    """Compute and store the figures of the run's best checkpoint, unless they are there.

    Raises:
        ValueError, OSError: there is no checkpoint or no text, or they cannot be read or written.
    """
    if stored_figures(run):
        return
    trained = TrainedRun(run, device, "auto")
    checkpoint = find_checkpoint(run)
    loaded = trained.load()
    split = trained.text(loaded.vocab, None, None, loaded.config.eval.split)
    print(f"txl: Computing the figures of {run} that need its model.", file=sys.stderr)
    figures = Figures(
        checkpoint=identity(checkpoint),
        split=split.name,
        costs=memory_costs(loaded, split, trained.precision),
        passage=passage(loaded, split, trained.precision),
    )
    write_whole(run / FILE, json.dumps({"sum": digest_of_json(figures), "figures": figures}) + "\n")


def memory_costs(loaded: LoadedModel, split: Split, precision: str) -> list[Cost]:
    """The cost of the first targets of a split without memory, with half, as in training and twice, and as in `[eval]`.

    There are so few streams that each fills the longest memory several times.
    """
    config = loaded.config
    trained, own = config.train.mem_len, config.eval_lengths.mem_len
    sizes = sorted({0, trained // 2, trained, 2 * trained, own})
    if config.model.base_kind in RECURRENT:  # every length but 0 means the same
        sizes = sorted({0, own or trained})
    streams = max(1, min(config.eval.batch_size, TARGETS // (4 * max(sizes[-1], 1))))
    how = replace(config.eval, batch_size=streams, max_tokens=TARGETS)
    costs = []
    for size in sizes:
        attn_len = config.eval_lengths.attn_len  # dropped where it needs a longer memory, as in `txl eval`
        attn_len = attn_len if attn_len and attn_len <= size + 1 else None
        lengths = replace(config.eval_lengths, mem_len=size, attn_len=attn_len)
        result = score_split(loaded, split, lengths, how, precision=precision)
        costs.append(Cost(mem_len=size, loss=result.loss, targets=result.targets))
    return costs


def passage(loaded: LoadedModel, split: Split, precision: str) -> Passage:
    """A part of the split, read after enough tokens to fill the memory."""
    lengths = loaded.config.eval_lengths
    loader = segments_of(loaded, split, lengths, replace(loaded.config.eval, batch_size=1, max_tokens=0))
    wanted = math.ceil(min(lengths.mem_len, CONTEXT) / lengths.tgt_len) + math.ceil(READ / lengths.tgt_len)
    ids: list[int] = []
    nats: list[float | None] = []

    def keep(segment: Segment, nll: Float[Tensor, "1 T"]) -> None:
        if segment.reset is not None:
            ids.append(int(segment.ids[0, 0]))
            nats.append(None)
        scored = segment.targets[0] >= 0
        ids.extend(segment.targets[0, scored].tolist())
        nats.extend(nll[0].float().cpu()[scored].tolist())

    evaluate(loaded.model, islice(loader, wanted), lengths, precision=precision, dump=keep)
    first = max(len(ids) - READ, 1)
    return Passage(start=first, texts=texts_of(loaded.vocab, ids[:first], ids[first:]), nats=nats[first:])


def texts_of(vocab: Vocab, prompt: Sequence[int], ids: Sequence[int]) -> list[str]:
    """Each token after `prompt` as text. A character of several tokens belongs to the last of them."""
    writer = TokenText(vocab, prompt)
    texts = [writer.write(new) for new in ids]
    texts[-1] += writer.close()
    return texts
