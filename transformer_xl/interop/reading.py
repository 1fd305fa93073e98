"""Read a checkpoint of another program as a model of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..config.settings import RunConfig
from ..config.values import listing
from ..data.vocab import Vocab
from ..mistake import Mistake, shortened
from ..model.baselines import build_model
from ..model.transformer_xl import TransformerXL
from ..run.checkpoint import LoadedModel
from ..run.parts import set_weights
from .configure import run_settings
from .huggingface import read_huggingface
from .mapping import fill
from .pytorch import read_nvidia, read_original
from .source import Source
from .tensorflow import read_tensorflow

Program = Literal["original", "tensorflow", "huggingface", "nvidia"]
_READERS: Mapping[Program, Callable[[Path], Source]] = {
    "original": read_original,
    "tensorflow": read_tensorflow,
    "huggingface": read_huggingface,
    "nvidia": read_nvidia,
}


@dataclass(frozen=True)
class Imported:
    """A converted checkpoint: settings, model, the vocabulary if the source has one, and a report on the arrays."""

    config: RunConfig
    model: TransformerXL
    """In eval mode, in float64 if an array is, otherwise in float32."""
    vocab: Vocab | None
    report: list[str]

    def build(self) -> LoadedModel:
        """The model, vocabulary and settings, as in `load_model`.

        Raises:
            ValueError: the source has no vocabulary, and none was given.
        """
        if self.vocab is None:
            raise Mistake(
                "It holds no vocabulary: give --vocab, a cache.pt, cache.pkl or vocab.pkl, a text with a token per "
                "line, or the name of a corpus that `txl data` prepared as for its training."
            )
        return LoadedModel(self.model, self.vocab, self.config)


def read_model(
    path: str | Path, program: Program, overrides: Sequence[str] = (), *, vocab: Vocab | None = None
) -> Imported:
    """Read a checkpoint of another program. Nothing in it is executed.

    Args:
        path: the file or folder that the program wrote.
        program: original (the authors' PyTorch code), tensorflow (the authors'), huggingface (TransfoXL) or nvidia.
        overrides: settings to change, `--section.field value ...`.
        vocab: the vocabulary, if the source has none or another one is wanted.

    Raises:
        ValueError: the checkpoint is of another kind; or arrays are missing, unexpected or of a wrong shape; or stated
            settings have a wrong type. The error lists all of them.
        FileNotFoundError: a file is missing.
    """
    if program not in _READERS:
        raise Mistake(f"--from must be one of {', '.join(_READERS)}, got {program!r}.")
    source = _READERS[program](Path(path))
    source.vocab = vocab or source.vocab
    config = run_settings(source, overrides)
    vocab, corpus = source.vocab, config.corpus
    if vocab is not None and (vocab.unit, vocab.newlines) != (corpus.unit, corpus.newlines):
        raise Mistake(
            f'corpus.unit and corpus.newlines must be those of the vocabulary, "{vocab.unit}" and "{vocab.newlines}", '
            f'got "{corpus.unit}" and "{corpus.newlines}". Leave them out.'
        )
    if source.vocab is not None and len(source.vocab) != config.model.vocab_size:
        raise Mistake(
            f"--vocab must hold as many tokens as there are weights for, {config.model.vocab_size:,}, and its own or "
            f"the one given has {len(source.vocab):,}. Give the vocabulary of the training."
        )
    with torch.random.fork_rng(devices=[]):  # the initial values are replaced
        model = build_model(config.model)
    if any(array.dtype == torch.float64 for array in source.arrays.values()):
        model = model.double()
    if source.run is None:
        fill(model, source)
    else:
        if broken := [name for name, array in source.arrays.items() if not array.isfinite().all()]:
            raise Mistake(f"{path} must hold finite numbers, and {listing(broken)} has others. Get it again.")
        set_weights(model, source.arrays, str(path))
    return Imported(config, model.eval(), source.vocab, _report(source, config, model))


def _report(source: Source, config: RunConfig, model: TransformerXL) -> list[str]:
    """The report: the use of every array, and the assumptions."""
    numbers = sum(source.arrays[name].numel() for name in source.spelled)
    weights = sum(parameter.numel() for parameter in model.parameters())
    tied = f", {numbers - weights:,} of them copies of tied arrays" if numbers > weights else ""
    lines = [f"{len(source.spelled)} arrays ({numbers:,} numbers{tied}), each used once."]
    for reason in dict.fromkeys(source.left_out.values()):
        names = [shortened(name) for name, why in source.left_out.items() if why == reason]
        lines.append(f"Left out ({reason}): {listing(names, 1000)}.")
    lengths = config.eval_lengths
    window = f"clamp_len {lengths.clamp_len or 'none'}, attn_len {lengths.attn_len or 'all'}"
    lines.append(f"Evaluation has tgt_len {lengths.tgt_len}, mem_len {lengths.mem_len}, {window}.")
    return lines + source.notes
