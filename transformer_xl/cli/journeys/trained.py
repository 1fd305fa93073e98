"""Open a trained run for a command: first its settings, then, if there are no problems, its weights and a text."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import torch

from ...config.problems import Problems, as_options
from ...config.settings import Lengths, RunConfig
from ...data.corpus import Corpus, Split
from ...data.header import WHOLE
from ...data.vocab import Vocab
from ...interop import local
from ...run import LoadedModel, find_checkpoint, load_config, load_model
from ...runtime.device import prepare_process, resolve_device, resolve_precision
from ..options.command import Part
from .native import build_native
from .texts import corpus_for


class Trained:
    """A run, its device and precision, and the problems with the options of the command."""

    def __init__(self, run: Path, device: str, precision: str):
        """Read the settings. Raises `FileNotFoundError` if there is no such run."""
        prepare_process()
        self.run: Path = local(run)
        self.config: RunConfig = load_config(find_checkpoint(self.run))
        self.problems: Problems = Problems()
        self.device: torch.device | None = self.problems.attempt(partial(resolve_device, device))
        chosen = self.device and self.problems.attempt(partial(resolve_precision, precision, self.device))
        self.precision: str = chosen[0] if chosen else ""

    def lengths(self, options: object) -> list[Lengths]:
        """Every combination of the lengths in a command's options. Other lengths are the run's.

        The run's `attn_len` is dropped if the requested memory is too short for it. Impossible lengths are added to the
        problems.
        """
        own, asked = self.config.eval_lengths, {}
        for name in ("tgt_len", "mem_len", "clamp_len", "attn_len"):
            given = getattr(options, name, None)
            asked[name] = given if isinstance(given, tuple) else () if given is None else (given,)
        same_length = getattr(options, "same_length", False)
        if same_length and asked["attn_len"]:
            self.problems.append("--same-length sets attn_len to mem_len. Give it or --attn-len, not both.")
        worded = as_options([name for name, values in asked.items() if values])
        found = []
        for sizes in product(*(values or (getattr(own, name),) for name, values in asked.items())):
            call = dict(zip(asked, sizes, strict=True))
            if same_length:
                call["attn_len"] = call["mem_len"]
            elif not asked["attn_len"] and own.attn_len is not None and own.attn_len > call["mem_len"] + 1:
                call["attn_len"] = None
            found.append(self.problems.attempt(partial(Lengths, **call), worded))
        return [lengths for lengths in found if lengths is not None]

    def load(self, *, step: bool = False) -> LoadedModel:
        """Load the model, to read token by token if `step`. If there are problems, raise `Mistake` before that."""
        self.problems.refuse()
        build_native(self.device, needed=step)
        return load_model(self.run, device=self.device or "cpu")

    def text(self, vocab: Vocab, data: str | None, asked: Part | None, default: Part) -> Text:
        """The text that a command reads: the split `asked`, otherwise all of a text without splits, or split `default`.

        `corpus_for` explains `data`.
        """
        corpus = corpus_for(self.run, self.config.corpus, vocab, data, asked)
        return Text(corpus, asked or (WHOLE if WHOLE in corpus.header.splits else default))


class Text:
    """A split of a corpus, and the facts to report about it."""

    def __init__(self, corpus: Corpus, name: Part):
        self.corpus: Corpus = corpus
        self.name: Part = name
        self.split: Split = corpus.split(name)
        self.unknown: int = corpus.unknown(name)
        self.about: dict[str, str] = {**corpus.about, "split": name}
        self.title: str = f"{corpus.name}, {name}{f' ({self.unknown:,} unknown)' if self.unknown else ''}"
