"""The attention sublayers of Wav2Vec2Conformer and XLNet (transformers 5), and ours with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Wav2Vec2ConformerConfig, XLNetConfig
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerRelPositionalEmbedding,
    Wav2Vec2ConformerSelfAttention,
)
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

from transformer_xl.model.bidirectional import BidirectionalAttention
from transformer_xl.runtime.device import PRECISIONS

Call = Callable[[Tensor], Tensor]
"""From vectors [B, T, D] to vectors."""


def conformer(width: int, heads: int, implementation: str = "sdpa") -> tuple[nn.Module, Call]:
    """Wav2Vec2Conformer's attention; random weights, biases u and v too."""
    config = Wav2Vec2ConformerConfig(
        hidden_size=width, num_attention_heads=heads, attention_dropout=0.0, max_source_positions=8
    )
    config._attn_implementation = implementation
    module = Wav2Vec2ConformerSelfAttention(config)
    encode = Wav2Vec2ConformerRelPositionalEmbedding(config)
    for bias in (module.pos_bias_u, module.pos_bias_v):
        nn.init.normal_(bias)
    return module, lambda x: module(x, relative_position_embeddings=encode(x))[0]


def xlnet(width: int, heads: int) -> tuple[nn.Module, Call]:
    """XLNet's attention with its residual and norm."""
    config = XLNetConfig(vocab_size=1, d_model=width, n_head=heads, n_layer=0, d_inner=1, dropout=0.0)
    module, model = XLNetRelativeAttention(config), XLNetModel(config)
    for name, weight in module.named_parameters():
        nn.init.normal_(weight, 1.0 if name == "layer_norm.weight" else 0.0, width**-0.5)

    def call(x: Tensor) -> Tensor:
        length, first = x.shape[1], x.transpose(0, 1)
        r = model.relative_positional_encoding(length, length, bsz=len(x)).to(x)
        return module(first, None, None, None, r, None)[0].transpose(0, 1)

    return module, call


PEERS: dict[str, Callable[[int, int], tuple[nn.Module, Call]]] = {
    "Wav2Vec2Conformer": conformer,
    "Wav2Vec2Conformer, eager": lambda width, heads: conformer(width, heads, "eager"),
    "XLNet": xlnet,
}


class Sublayer:
    """A peer, or our module with its weights: forward, or forward and backward."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.manual_seed(0)
        module, self.call = PEERS[job["peer"]](job["width"], job["heads"])
        if job["ours"]:
            xlnet = job["peer"] == "XLNet"
            convert = BidirectionalAttention.from_xlnet if xlnet else BidirectionalAttention.from_conformer
            module = self.call = convert(module.state_dict())
        self.module, self.backward = module.to(job["device"]).train(), job["backward"]
        self.dtype = PRECISIONS[job["precision"]]
        torch.manual_seed(1)
        self.x = torch.randn(job["batch"], job["length"], job["width"], device=job["device"]).requires_grad_()
        self.cotangent = torch.randn_like(self.x)
        weights = sum(p.numel() * p.element_size() for p in module.parameters())
        self.kept_bytes = weights + 2 * self.x.numel() * self.x.element_size()

    def run(self) -> None:
        with torch.set_grad_enabled(self.backward), self._autocast():
            out = self.call(self.x)
        if self.backward:
            used = [p for p in self.module.parameters() if p.requires_grad]
            torch.autograd.grad(out, [self.x, *used], self.cotangent.to(out.dtype), allow_unused=True)

    def output(self) -> list[float]:
        """The results, which must be equal to those of the other contender."""
        with torch.no_grad(), self._autocast():
            return self.call(self.x).float().flatten().tolist()

    def _autocast(self) -> Any:
        return torch.autocast(self.x.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)
