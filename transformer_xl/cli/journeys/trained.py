"""A trained run as a command opens it: its settings first, then, if nothing is wrong, its weights and a text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ...checkpoint import LoadedModel, find_checkpoint, load_config, load_model
from ...config.problems import Problems, as_options
from ...config.settings import Lengths, RunConfig
from ...data.corpus import Corpus
from ...interop import local
from ...runtime.device import resolve_device, resolve_precision, reuse_memory
from .texts import Part, corpus_for, part_of, title


class Trained:
    """A run, the device and the precision to use it with, and the problems of what is asked of it."""

    def __init__(self, run: Path, device: str, precision: str):
        """Raises `FileNotFoundError` if there is no such run."""
        reuse_memory()
        self.run = local(run)
        self.config = load_config(find_checkpoint(self.run))
        self.problems = Problems()
        self.device = self.problems.attempt(partial(resolve_device, device))
        chosen = self.device and self.problems.attempt(partial(resolve_precision, precision, self.device))
        self.precision = chosen[0] if chosen else ""

    def lengths(self, **asked: Any) -> list[Lengths]:
        """`eval_lengths`; empty if these do not fit, which is then one of the problems."""
        return self.problems.attempt(partial(eval_lengths, self.config, **asked)) or []

    def load(self) -> LoadedModel:
        """The model. Raises `Mistake` for the problems before any weight is read."""
        self.problems.refuse()
        return load_model(self.run, device=self.device or "cpu")

    def text(self, loaded: LoadedModel, data: str | None, asked: Part | None, default: Part) -> Text:
        """The text that a command reads; `corpus_for` explains `data` and `asked`."""
        corpus = corpus_for(self.run, self.config.corpus, loaded.vocab, data, asked)
        return Text(corpus, part_of(corpus, asked, default))


class Text:
    """A split of a corpus, with what is reported about it."""

    def __init__(self, corpus: Corpus, name: Part):
        self.corpus, self.name, self.split = corpus, name, corpus.split(name)
        self.unknown = corpus.unknown(name)
        self.about = {**corpus.about, "split": name}
        self.title = title(corpus, name)


def eval_lengths(
    config: RunConfig,
    *,
    tgt_len: int | None = None,
    mem_len: Sequence[int] = (),
    clamp_len: Sequence[int | None] = (),
    attn_len: Sequence[int | None] = (),
    same_length: bool = False,
) -> list[Lengths]:
    """Every combination of the lengths asked for; `eval_lengths` of the run gives the others.

    An `attn_len` that is only inherited is dropped where the memory asked for is too short for it. `same_length` means
    `attn_len = mem_len`, as in the original PyTorch code.

    Raises:
        Mistake: lengths that no call can have.
    """
    own = config.eval_lengths
    problems, found = Problems(), []
    sizes = {"tgt_len": tgt_len is not None, "mem_len": mem_len, "clamp_len": clamp_len, "attn_len": attn_len}
    worded = as_options([name for name, size in sizes.items() if size])
    if same_length and attn_len:
        problems.append("--same-length sets attn_len to mem_len. Give it or --attn-len, not both.")
    given = mem_len or [own.mem_len], clamp_len or [own.clamp_len], attn_len or [own.attn_len]
    for memory, clamp, window in product(*given):
        if same_length:
            window = memory
        elif not attn_len and window is not None and window > memory + 1:
            window = None
        width = own.tgt_len if tgt_len is None else tgt_len
        call = partial(Lengths, tgt_len=width, mem_len=memory, clamp_len=clamp, attn_len=window)
        found.append(problems.attempt(call, worded))
    problems.refuse()
    return [lengths for lengths in found if lengths is not None]
