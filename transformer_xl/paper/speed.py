"""Table 9: the time per token of a sliding window over that of segments with a memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from ..config.recipe import load_recipe, split_overrides, unsaid
from ..config.settings import Lengths, TransformerXLConfig
from ..evaluation.score import inference
from ..evaluation.sliding import Sliding
from ..model.baselines import build_model
from ..runtime.device import prepare_process, resolve_device, resolve_precision
from .exhibits import training

TURNS = 3
TOKENS = 1 << 14
"""Number of tokens in the windows that are read side by side."""
SEGMENTS = (64, 128, 256, 512)
"""Lengths of segments; the fastest one counts."""


def slowdown(size: str, attn_len: int) -> float:
    """How many times as long Vaswani's model takes per token, with a window of `attn_len` tokens that moves by one, as
    Transformer-XL of the same shape, whose every query sees as many keys.

    The two are timed in turn, and each time is a median. The weights are as at the start of training.
    """
    prepare_process()
    standard = training("standard", size)
    assert standard is not None, "the row exists at every size"
    recipe, *words = standard
    shape = load_recipe(recipe, split_overrides(words)[0], note=unsaid).model
    shape = replace(shape, vocab_size=shape.vocab_size or 256)
    device = resolve_device("auto")
    windows = max(TOKENS // attn_len, 1)
    vanilla = _timer(shape, "vaswani", device, Lengths(tgt_len=windows, mem_len=0), attn_len)
    ours = [
        _timer(shape, "transformer-xl", device, Lengths(tgt_len=n, mem_len=attn_len - 1, attn_len=attn_len), attn_len)
        for n in SEGMENTS
    ]
    fastest = min(ours, key=lambda timer: min(timer(), timer()))
    vanilla()
    turns = [(vanilla(), fastest()) for _ in range(TURNS)]
    return median(turn[0] for turn in turns) / median(turn[1] for turn in turns)


def _timer(
    shape: TransformerXLConfig, kind: str, device: torch.device, lengths: Lengths, attn_len: int
) -> Callable[[], float]:
    """A function that reads a segment after `attn_len` tokens and returns the seconds per token."""
    model = build_model(replace(shape, kind=kind)).to(device).eval()
    sliding = Sliding(model, attn_len, 1) if kind == "vaswani" else None
    precision = resolve_precision("auto", device)[0]
    ids = torch.randint(shape.vocab_size, (1, lengths.tgt_len), device=device)
    before = torch.randint(shape.vocab_size, (1, attn_len), device=device)

    def run() -> float:
        with inference(sliding or model, precision) as read:
            if sliding:
                memory = sliding.empty_memory(1, lengths).extend(before, kept=attn_len - 1)
            else:
                empty = read.empty_cache(1, lengths)
                nll, memory = read(before, before, empty, replace(lengths, tgt_len=attn_len))
                nll.sum().item()  # waits for the device
            start = time.perf_counter()
            nll, _ = read(ids, ids, memory, lengths)
            nll.sum().item()
            return (time.perf_counter() - start) / lengths.tgt_len

    return run
