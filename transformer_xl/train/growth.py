"""The weights of a model whose vocabulary grew: old rows stay, new ones begin as the row of `<unk>`, or the mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from math import log

import torch
from jaxtyping import Float
from torch import Tensor

from ..data.vocab import Vocab
from ..model.transformer_xl import TransformerXL
from ..run.parts import weights

NOISE = 0.1
"""Standard deviation of the noise on a new row, in units of that of the table."""


def grown(model: TransformerXL, stored: Mapping[str, Tensor], vocab: Vocab) -> dict[str, Tensor]:
    """The stored weights, of the vocabulary `vocab`, with as many rows as the model, whose vocabulary begins with it.

    `<unk>` and the new tokens of its band share the probability that `<unk>` had, so that known tokens have the
    probabilities that they had, but for the noise. Weights of matches grow in each block of `ngrams.table`.
    """
    more, last = model.config.vocab_size - len(vocab), max((0, *model.config.cutoffs))
    found = dict(stored)
    for name, value in weights(model).items():
        old = stored.get(name)
        if old is None or old.shape == value.shape or old.shape[1:] != value.shape[1:]:
            continue  # `set_weights` names what does not fit
        if name == "ngrams.table.weight":
            sizes = replace(model.config, vocab_size=len(vocab)).ngram_sizes
            blocks = [old[first:end] for first, end in pairwise(accumulate((0, *sizes)))]
            kept = len(model.config.ngrams)
            found[name] = torch.cat([*blocks[:kept], *(_more_rows(block, more, None) for block in blocks[kept:])])
        elif len(value) == len(old) + more:
            begin = len(vocab) - len(old)  # the first id of this table, whose band may begin later
            unk = None if vocab.unk is None or vocab.unk < max(begin, last) else vocab.unk - begin
            found[name] = _more_rows(old, more, unk)
    return found


def _more_rows(old: Float[Tensor, "V ..."], more: int, unk: int | None) -> Float[Tensor, "W ..."]:
    """A table, or the bias of its rows, with `more` rows like row `unk`; None: like their mean."""
    like = old.mean(0, keepdim=True) if unk is None else old[unk : unk + 1]
    if old.ndim == 1:
        share = like - log(more + 1)
        old = old if unk is None else torch.cat([old[:unk], share, old[unk + 1 :]])
        return torch.cat([old, share.expand(more)])
    noise = torch.randn(more, *old.shape[1:], dtype=torch.float32) * (NOISE * old.float().std())
    return torch.cat([old, (like.float() + noise).to(old.dtype)])
