"""Check that a converted model computes the same numbers as Hugging Face's own model, in one process.

    python -m experiments.parity_huggingface [--std 0.1]

It needs transformers 4.37.2, the last version with a working Transformer-XL. It converts random models with
`save_pretrained` and `read_model`, runs both on the same segments, and prints the largest differences.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLLMHeadModel

from transformer_xl import TransformerXL
from transformer_xl.config.settings import Lengths
from transformer_xl.interop.reading import read_model
from transformer_xl.model.memory import Memory
from transformer_xl.train.objective import Objective

SIZES = {"vocab_size": 97, "d_model": 32, "n_head": 3, "d_head": 5, "d_inner": 23, "n_layer": 3, "mem_len": 11}
BATCH, TGT_LEN, SEGMENTS = 3, 5, 4
BANDS = {
    "plain": {"cutoffs": [], "div_val": 1},
    "div_val 1": {"cutoffs": [13, 41, 59], "div_val": 1},
    "div_val 2": {"cutoffs": [13, 41, 59], "div_val": 2},
    "div_val 4": {"cutoffs": [13, 41], "div_val": 4},
}
STARTS = {"own": None, "empty": 0, "partial": 4, "full": 11}
"""Length of the memory given; None: transformers starts with zeros, and a converted model does by itself."""
BARS = {torch.float64: 1e-12, torch.float32: 2e-6}


class Reading(NamedTuple):
    """What a model said of segments read one after another."""

    nll: Tensor
    memories: list[list[Tensor]]
    """After each segment, those of the layers."""
    gradients: dict[str, Tensor]


def new_model(settings: dict[str, Any], dtype: torch.dtype) -> TransfoXLLMHeadModel:
    """A model without dropout, as transformers initialises it."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # the frequencies of the encodings are computed in it
    try:
        return TransfoXLLMHeadModel(TransfoXLConfig(dropout=0.0, **settings)).to(dtype)
    finally:
        torch.set_default_dtype(default)


def random_model(settings: dict[str, Any], dtype: torch.dtype, seed: int, std: float = 0.3) -> TransfoXLLMHeadModel:
    """One whose every weight is random."""
    model = new_model(settings, dtype).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = std * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(values + name.endswith("layer_norm.weight"))
    return model


@contextmanager
def scores_as_they_are() -> Iterator[None]:
    """transformers takes scores to float32 to mask them with the lowest number of their own type: float64 fails."""
    with patch.object(torch.Tensor, "float", lambda x: x):
        yield


def read(model: TransfoXLLMHeadModel, ids: Tensor, targets: Tensor, start: list[Tensor] | None) -> Reading:
    """Segments [S, B, T] read one after another, by transformers' log-probabilities and by its labels, which agree."""
    mems, nll, memories, loss = start, [], [], torch.zeros((), dtype=model.dtype)
    model.zero_grad()
    model.crit.keep_order = True
    with scores_as_they_are():
        for x, y in zip(ids, targets, strict=True):
            labelled = model(x, mems=mems, labels=torch.cat([x[:, :1], y[:, :-1]], 1)).losses
            out = model(x, mems=mems)
            mems = out.mems
            nll.append(-out.prediction_scores.gather(2, y[..., None])[..., 0])
            torch.testing.assert_close(labelled, nll[-1][:, :-1])
            memories.append(mems)
            loss = loss + nll[-1].mean()
    loss.backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    return Reading(torch.stack(nll).detach(), memories, gradients)


def random_memory(model: TransfoXLLMHeadModel, length: int, batch: int, seed: int) -> list[Tensor]:
    """Memory of that many positions, in transformers' layout."""
    random, config = torch.Generator().manual_seed(seed), model.config
    shape = (config.n_layer, length, batch, config.d_model)
    return list(torch.randn(shape, generator=random, dtype=torch.float64).to(model.dtype))


def settings() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Bands, start and settings of every case of the grid, which alternates pre-norm and untied tables."""
    names = ("d_embed", "proj_share_all_but_first", "untie_r", "clamp_len", "same_length")
    switches = product((24, 32), (True, False), (True, False), (-1, 6), (True, False))
    for number, (bands, start, switch) in enumerate(product(BANDS, STARTS, switches)):
        turns = {"pre_lnorm": number % 3 == 2, "tie_word_embeddings": number % 5 != 4}
        yield bands, start, SIZES | BANDS[bands] | dict(zip(names, switch, strict=True)) | turns


def converted(model: TransfoXLLMHeadModel, pickled: bool) -> tuple[TransformerXL, Lengths]:
    """The model that `read_model` reads from the files of `save_pretrained`."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, safe_serialization=not pickled)
        imported = read_model(Path(folder), "huggingface")
        return imported.model, imported.config.eval_lengths


def differences(asked: dict[str, Any], start: int | None, dtype: torch.dtype, seed: int, std: float) -> list[float]:
    """The largest differences in losses, memories and relative gradients of one case.

    A gradient above 1 is relative to the largest of its array, because layer norm enlarges the gradients of embeddings
    near 0.
    """
    model = random_model(asked, dtype, seed, std)
    text = torch.randint(SIZES["vocab_size"], (BATCH, SEGMENTS * TGT_LEN + 1))
    ids, targets = (torch.stack(x.split(TGT_LEN, 1)) for x in (text[:, :-1], text[:, 1:]))
    given = None if start is None else random_memory(model, start, BATCH, seed)
    theirs = read(model, ids, targets, given)

    ours, lengths = converted(model, pickled=seed % 2 == 1)
    memory = None
    if given is not None:
        ours.backbone.config = replace(ours.config, zero_memory=False)
        memory = Memory(tuple(x.transpose(0, 1) for x in given))
    losses, memories, loss = [0.0], [0.0], torch.zeros((), dtype=dtype)
    for x, y, nll, mems in zip(ids, targets, theirs.nll, theirs.memories, strict=True):
        mean, own, memory = Objective(ours)(x, y, memory, lengths)
        loss = loss + mean
        losses.append(largest(own, nll))
        memories += [largest(a, b.transpose(0, 1)) for a, b in zip(memory.layers, mems, strict=True)]
    loss.backward()
    with torch.no_grad():  # gradients have the layout of weights, so the importer puts theirs in our order
        for name, parameter in model.named_parameters():
            parameter.copy_(theirs.gradients[name])
    gradients = dict(converted(model, pickled=seed % 2 == 0)[0].named_parameters())
    shares = (
        largest(p.grad, gradients[name]) / max(gradients[name].abs().max().item(), 1)
        for name, p in ours.named_parameters()
    )
    return [max(losses), max(memories), max(shares)]


def largest(a: Tensor | None, b: Tensor) -> float:
    """The largest absolute difference."""
    assert a is not None and a.dtype == b.dtype, "both sides compute in one type, and every weight has a gradient"
    difference = (a - b).abs().max().item()
    assert isfinite(difference), "a difference that is no number would be no one's largest"
    return difference


def grid(std: float) -> bool:
    """Compare all cases, and print the largest differences for each kind of bands, start and precision."""
    found: dict[tuple[str, str, torch.dtype], list[list[float]]] = defaultdict(list)
    for number, (bands, start, asked) in enumerate(settings()):
        for dtype in BARS:
            torch.manual_seed(number)
            found[bands, start, dtype].append(differences(asked, STARTS[start], dtype, number, std))
    print("bands      start   precision      cases    losses  memories gradients")
    passed = True
    for (bands, start, dtype), cases in found.items():
        worst = [max(column) for column in zip(*cases, strict=True)]
        print(f"{bands:10} {start:7} {dtype!s:14} {len(cases):>5}", *(f"{each:>9.1e}" for each in worst))
        passed = passed and max(worst) <= BARS[dtype]
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # With 0.1 losses are 2.5 to 7 nats, and the largest share of attention is twice the mean one.
    parser.add_argument("--std", type=float, default=0.1, help="standard deviation of all weights")
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    transformers.logging.set_verbosity_error()
    return int(not grid(options.std))


if __name__ == "__main__":
    sys.exit(main())
