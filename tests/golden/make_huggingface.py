"""Golden files of Hugging Face's Transformer-XL: tiny models as `save_pretrained` writes them, and what they say.

    PYTHONHASHSEED=0 python tests/golden/make_huggingface.py tests/golden/huggingface

Made with Python 3.11, torch 2.13.0 (CPU), transformers 4.37.2, sacremoses 0.2.0 and safetensors 0.8.0. Twelve cases
cover in pairs: the bands, the memory at the start, and projected embeddings, tied projections, tied tables, untied
biases, clamp_len, same_length and pre-norm. Beside each model stands `expected.safetensors`:

    ids, targets [S, B, T]   the segments, read one after another
    nll [S, B, T]            nats of each target
    memory.S.LAYER [M, B, D] behind S segments; memory.0.LAYER is given, or absent: transformers' own start
    gradient.NAME            of the segments' mean nll, summed, by the model's parameters

All weights are random, also those that initial values leave at 0.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLLMHeadModel, TransfoXLTokenizer

SIZES = {"vocab_size": 29, "d_model": 8, "n_head": 2, "d_head": 3, "d_inner": 11, "n_layer": 2, "mem_len": 7}
BATCH, TGT_LEN, SEGMENTS = 2, 3, 4
BANDS = {
    "plain": {"cutoffs": [], "div_val": 1},
    "div1": {"cutoffs": [5, 13], "div_val": 1},
    "div2": {"cutoffs": [5, 13], "div_val": 2},
    "div4": {"cutoffs": [11], "div_val": 4},
}
STARTS = {"zeros": None, "empty": 0, "partial": 2}
"""Length of the memory given; None gives none, and transformers starts with mem_len zeros."""


class Reading(NamedTuple):
    """What a model said of segments read one after another."""

    nll: Tensor
    memories: list[list[Tensor]]
    """Behind each segment, those of the layers."""
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


def cases() -> Iterable[tuple[str, dict[str, Any], int | None]]:
    """Name, settings and start of each; any two settings occur in all their combinations."""
    for j, (memory, start) in enumerate(STARTS.items()):
        for i, (bands, widths) in enumerate(BANDS.items()):

            def column(mask: int, number: int = 4 * j + i) -> bool:
                return (mask & number).bit_count() % 2 == 1

            settings = SIZES | widths
            settings |= {"d_embed": 12 if column(0b0101) else 8, "proj_share_all_but_first": column(0b1010)}
            settings |= {"untie_r": column(0b0110), "clamp_len": 4 if column(0b1001) else -1}
            settings |= {"same_length": column(0b0111), "pre_lnorm": column(0b1011)}
            yield f"{bands}-{memory}", settings | {"tie_word_embeddings": column(0b1101)}, start


def write_vocabulary(folder: Path, size: int) -> None:
    """The tokenizer's files, of a list of words."""
    words = ["<eos>", "<unk>", "the", ",", "naïve", "日本", "@-@", *(f"word{i}" for i in range(7, size))]
    with chdir(folder):  # the pickle names the list
        Path("words.txt").write_text("\n".join(words), encoding="utf-8")
        TransfoXLTokenizer(vocab_file="words.txt").save_pretrained(".")
        os.remove("words.txt")


def main(folder: Path) -> None:
    """Write all cases; float32 ones as pytorch_model.bin."""
    warnings.simplefilter("ignore", DeprecationWarning)
    for number, (name, settings, start) in enumerate(cases()):
        single = name in ("plain-zeros", "div1-empty", "div4-partial")
        model = random_model(settings, torch.float32 if single else torch.float64, number)
        model.save_pretrained(folder / name, safe_serialization=not single)
        (folder / name / "generation_config.json").unlink()
        random = torch.Generator().manual_seed(100 + number)
        text = torch.randint(settings["vocab_size"], (BATCH, SEGMENTS * TGT_LEN + 1), generator=random)
        ids, targets = (torch.stack(x.split(TGT_LEN, 1)) for x in (text[:, :-1], text[:, 1:]))
        given = None if start is None else random_memory(model, start, BATCH, 200 + number)
        reading = read(model, ids, targets, given)
        expected = {"ids": ids, "targets": targets, "nll": reading.nll}
        for segment, memory in enumerate([given or [], *reading.memories]):
            expected |= {f"memory.{segment}.{layer}": x.clone() for layer, x in enumerate(memory)}
        expected |= {f"gradient.{name}": value for name, value in reading.gradients.items()}
        save_file({key: value.contiguous() for key, value in expected.items()}, folder / name / "expected.safetensors")
    write_vocabulary(folder / "div2-empty", SIZES["vocab_size"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
