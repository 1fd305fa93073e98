"""What type checkers see of the public names. pyright reads this file; running it shows that the types hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor

from transformer_xl import (
    LanguageModel,
    Lengths,
    Memory,
    TransformerXL,
    TransformerXLBackbone,
    TransformerXLConfig,
    VectorStep,
    load_model,
)
from transformer_xl.config.settings import RunConfig
from transformer_xl.data.vocab import Vocab
from transformer_xl.model.inference import KVCache
from transformer_xl.ops import relative_attention


def test_calls_have_types() -> None:
    config = TransformerXLConfig(vocab_size=7, n_layer=1, n_head=2, d_head=3, d_model=6, d_inner=5)
    lengths, ids = Lengths(tgt_len=4, mem_len=4), torch.zeros(2, 4, dtype=torch.int64)
    model = TransformerXL(config).eval()
    assert_type(model(ids, ids, None, lengths), tuple[Tensor, Memory])
    assert_type(model.log_probs(ids, None, lengths, last=1), tuple[Tensor, Memory])
    assert_type(model.hidden(ids, None, lengths), tuple[Tensor, Memory])
    nll, memory = model(ids, ids, model.empty_memory(2, lengths), lengths)
    assert_type(nll, Tensor)
    assert_type(memory, Memory)
    assert isinstance(nll, Tensor) and isinstance(memory, Memory)
    outputs, after = TransformerXLBackbone(config)(torch.zeros(2, 4, 6), None, lengths)
    assert_type(outputs, list[Tensor])
    assert_type(after, Memory)
    assert len(outputs) == 1 and isinstance(after, Memory)
    with torch.no_grad():
        cache = TransformerXLBackbone(config).cached(memory, lengths)
        assert_type(cache, KVCache | Memory)
    step = VectorStep(TransformerXLBackbone(config).eval(), memory, lengths)
    assert_type(step(torch.zeros(2, 1, 6)), Tensor)
    q = torch.zeros(2, 2, 4, 3)
    assert_type(relative_attention(q, q, q, q[0], q[0, :, 0], q[0, :, 0]), Tensor)


def types_of_a_loaded_model(path: Path) -> None:
    """For type checkers alone."""
    loaded = load_model(path)
    assert_type(loaded, LanguageModel)
    assert_type(loaded.model, TransformerXL)
    assert_type(loaded.vocab, Vocab)
    assert_type(loaded.config, RunConfig)
    assert_type(loaded.score("text").nats.sum(), Any)
    assert_type(loaded.generate("text"), str)
