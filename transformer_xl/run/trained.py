"""A trained run as commands open it: first its settings, then, if there are no problems, its weights and a text."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

from ..config.problems import OPTION, Problems
from ..config.recipe import text_name
from ..config.settings import LENGTHS, LENGTHS_OF_KINDS, Lengths, Part, RunConfig
from ..data.corpora.published import DATASETS
from ..data.corpus import WHOLE, Corpus, Split
from ..data.datasets import open_corpus, store_of
from ..data.vocab import Vocab
from ..mistake import Mistake, printable
from ..ops.choice import build_native
from ..runtime.device import prepare_process, resolve_device, resolve_precision
from .checkpoint import LoadedModel, load_config, load_model
from .folder import Run, find_checkpoint


class TrainedRun:
    """A run, its device and precision, and the problems with the options of the command."""

    def __init__(self, run: str | Path, device: str, precision: str):
        """Read the settings. Raises `FileNotFoundError` if there is no such run."""
        prepare_process()
        self.path: Path = Path(run)
        best, last = (load_config(find_checkpoint(self.path, which=which)) for which in ("best", "last"))
        self.config: RunConfig = replace(best, corpus=last.corpus)  # the text may have been moved since the best one
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
        for name in LENGTHS:
            given = getattr(options, name, None)
            asked[name] = given if isinstance(given, tuple) else () if given is None else (given,)
        same_length = getattr(options, "same_length", False)
        limits = {"clamp_len": asked["clamp_len"], "attn_len": (*asked["attn_len"], same_length or None)}
        for name, kinds in LENGTHS_OF_KINDS.items():
            if {*limits[name]} - {None} and self.config.model.base_kind not in kinds:
                named = "--clamp-len" if name == "clamp_len" else "--attn-len and --same-length"
                self.problems.append(f"{named} must be left out for model.kind = {self.config.model.kind}.")
        if same_length and asked["attn_len"]:
            self.problems.append("--same-length sets attn_len to mem_len. Give it or --attn-len, not both.")
        found = []
        for sizes in product(*(values or (getattr(own, name),) for name, values in asked.items())):
            call = dict(zip(asked, sizes, strict=True))
            if same_length and not call["mem_len"]:
                self.problems.append("--same-length needs a memory: --mem-len must be at least 1, got 0.")
                continue
            if same_length:
                call["attn_len"] = call["mem_len"]
            elif not asked["attn_len"] and own.attn_len is not None and own.attn_len > call["mem_len"] + 1:
                call["attn_len"] = None
            found.append(self.problems.attempt(partial(Lengths, **call), OPTION))
        return [lengths for lengths in found if lengths is not None]

    def load(self) -> LoadedModel:
        """Load the model. If there are problems, raise `Mistake` before that."""
        self.problems.refuse()
        build_native(self.device)
        return load_model(self.path, device=self.device or "cpu")

    def refuse_diverged(self, *figures: np.ndarray) -> None:
        """Raise a `Mistake` if a figure of the model is not finite. Called before anything is written."""
        if not all(np.isfinite(each).all() for each in figures):
            raise Mistake(
                f"{self.path} gives figures that are not finite: its weights diverged. Use another checkpoint."
            )

    def corpus(self, vocab: Vocab, data: str | None, asked: str | None) -> Corpus:
        """The run's own corpus, or the text `data`, in the run's vocabulary.

        A text without splits is cut only if `asked` names a split. Notes about the text go to standard error.

        Raises:
            ValueError, OSError: there is no such text, the run's text has changed, or the vocabulary does not fit it.
        """
        run, config = self.path, self.config.corpus
        if data is None and not config.name:
            raise Mistake(f"{run} does not say which text it is for: name a file, a folder or a corpus by --data.")
        whole = data is not None and asked in (None, WHOLE)
        named = config if data is None else replace(config, name=text_name(data))
        corpus = open_corpus(named, vocab, whole=whole, scored=True)
        if data is None and (changed := Run.of(run).changed_splits(corpus)):
            raise Mistake(
                f"{config.name} has changed since {run} was trained on it: the SHA-256 of {changed} differs, so text "
                "that trained the model may be in it. Restore it, or name what to read by --data."
            )
        notes = list(corpus.notes)
        if whole and data is not None and text_name(data) == config.name:
            notes.append(f"{data} trained this model, and is read whole: --split test is what was held out of it.")
        if data is not None and data != text_name(data) and (data in DATASETS or store_of(data) is not None):
            notes.append(f"{data} is read here, not the corpus of that name, as in training.")
        for note in notes:
            print(f"txl: {printable(note)}", file=sys.stderr)
        return corpus

    def text(self, vocab: Vocab, data: str | None, asked: Part | None, default: Part) -> Split:
        """The split that a command reads, as `corpus` and `split_of` say."""
        return split_of(self.corpus(vocab, data, asked), asked, default)


def split_of(corpus: Corpus, asked: Part | None, default: Part) -> Split:
    """The split `asked`; by default all of a text without splits, otherwise `default`."""
    return corpus.split(asked or (WHOLE if WHOLE in corpus.header.splits else default))
