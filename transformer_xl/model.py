"""Transformer-XL (Dai et al., ACL 2019) on one page: embedding, layers that read a memory, softmax.

    nll, memory = model(ids, targets, memory, lengths)

State goes in and comes out; no layer keeps anything between calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from .attention import Linear, RelativeMultiheadAttention, sinusoids
from .memory import KVCache, Memory
from .ops.dropout import Dropout
from .settings import Lengths, TransformerXLConfig

State = TypeVar("State", Memory, KVCache)


class FeedForward(nn.Module):
    """The position-wise sublayer: norm, two linear layers with a ReLU between, residual."""

    def __init__(self, d_model: int, d_inner: int, *, dropout: float, pre_lnorm: bool, layer_norm_epsilon: float):
        super().__init__()
        self.pre_lnorm = pre_lnorm
        self.inner = Linear(d_model, d_inner)
        self.outer = Linear(d_inner, d_model)
        self.norm = nn.LayerNorm(d_model, eps=layer_norm_epsilon)
        self.dropout = Dropout(dropout)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        inner = self.dropout(self.inner(self.norm(x) if self.pre_lnorm else x))
        inner = F.relu(inner, inplace=True)  # the same as before dropout, and what backward keeps is one tensor less
        x = x + self.dropout(self.outer(inner))
        return x if self.pre_lnorm else self.norm(x)


class DecoderLayer(nn.Module):
    """Attention over memory and segment, then feed-forward."""

    def __init__(self, config: TransformerXLConfig, backend: str = "auto"):
        super().__init__()
        shared = {
            "dropout": config.dropout,
            "pre_lnorm": config.pre_lnorm,
            "layer_norm_epsilon": config.layer_norm_epsilon,
        }
        self.attention = RelativeMultiheadAttention(
            config.d_model, config.n_head, config.d_head, dropatt=config.dropatt, backend=backend, **shared
        )
        self.feed_forward = FeedForward(config.d_model, config.d_inner, **shared)

    def forward(self, x, past, positions, content_bias, position_bias, *, attn_len, valid):
        x = self.attention(x, past, positions, content_bias, position_bias, attn_len=attn_len, valid=valid)
        return self.feed_forward(x)


class TransformerXL(nn.Module):
    """A language model whose segments remember the ones before.

    Its state is a `Memory` of `n_layer` layer inputs; None starts with an empty one. With `recompute` each layer is
    computed again in backward, from its inputs, which is all that is kept of it.
    """

    def __init__(self, config: TransformerXLConfig, *, backend: str = "auto", recompute: bool = False):
        super().__init__()
        self.config, self.recompute = config, recompute
        self.takes_padding = not config.zero_memory
        """Whether rows of a batch may begin at different places; zeros before the beginning leave no room for that."""
        sizes = (config.vocab_size, config.embed_width, config.d_model)
        bands = {"cutoffs": config.cutoffs, "div_val": config.div_val}
        scale = config.d_model**0.5 if config.embedding_scale is None else config.embedding_scale
        self.embedding = AdaptiveEmbedding(*sizes, scale=scale, **bands)
        self.layers = nn.ModuleList(DecoderLayer(config, backend) for _ in range(config.n_layer))
        biases = (config.n_layer if config.untie_r else 1, config.n_head, config.d_head)
        self.content_bias = nn.Parameter(torch.empty(biases))
        self.position_bias = nn.Parameter(torch.empty(biases))
        self.final_norm = nn.LayerNorm(config.d_model, config.layer_norm_epsilon) if config.final_norm else None
        self.dropout = Dropout(config.dropout)
        self.softmax = AdaptiveSoftmax(*sizes, **bands)
        self.softmax.tie(self.embedding, weight=config.tie_weight, projections=config.tie_projs)
        self.init_weights()

    def init_weights(self) -> None:
        """The original code's start:

        linear, embedding, cluster weights, u, v    N(0, init_std)
        projections of embedding and softmax        N(0, proj_init_std)
        norm weights                                N(1, init_std)
        every other bias                            0
        """
        std = self.config.init_std
        for name, parameter in self.named_parameters():
            if "projections" in name:
                nn.init.normal_(parameter, 0.0, self.config.proj_init_std)
            elif name in ("content_bias", "position_bias"):
                nn.init.normal_(parameter, 0.0, std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, std)

    def forward(
        self, ids: Int[Tensor, "B T"], targets: Int[Tensor, "B T"], memory: State | None, lengths: Lengths
    ) -> tuple[Float[Tensor, "B T"], State]:
        """Nats of each target, in order (0 where it is -1: not scored), and the memory for the next segment."""
        x, tables = self.embedding.lookup(ids)
        hidden, after = self._read(x, memory, lengths)
        return self.softmax.nll(hidden, targets, tables), after

    def objective(
        self, ids: Int[Tensor, "B T"], targets: Int[Tensor, "B T"], memory: State | None, lengths: Lengths
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B T"], State]:
        """What is trained: the mean nll of the scored targets; also what `forward` returns."""
        nll, after = self(ids, targets, memory, lengths)
        return nll.sum() / (targets >= 0).sum().clamp(min=1), nll, after

    def log_probs(
        self, ids: Int[Tensor, "B T"], memory: State | None, lengths: Lengths, last: int | None = None
    ) -> tuple[Float[Tensor, "B L V"], State]:
        """Log-probabilities of what follows each position (L = T), or only the `last` ones (L = last)."""
        hidden, memory = self.hidden(ids, memory, lengths)
        return self.softmax.log_probs(hidden if last is None else hidden[:, hidden.shape[1] - last :]), memory

    def hidden(
        self, ids: Int[Tensor, "B T"], memory: State | None, lengths: Lengths
    ) -> tuple[Float[Tensor, "B T D"], State]:
        """Features: the last layer's output. The memory given is attended whole (within `attn_len`) and comes back
        extended by this segment and cut to `mem_len`."""
        return self._read(self.embedding(ids), memory, lengths)

    def _read(self, x: Float[Tensor, "B T D"], memory: Any, lengths: Lengths) -> tuple[Float[Tensor, "B T D"], Any]:
        x = self.dropout(x)
        memory = self.empty_memory(len(x)) if memory is None else memory
        encode = partial(self._positions, clamp_len=lengths.clamp_len, like=x)
        if isinstance(memory, KVCache):
            assert memory.lengths.clamp_len == lengths.clamp_len, "a cache keeps the clamp_len it was made for"
            pasts = memory.layers(x.shape[1])
            memory.cover(x.shape[1], encode)
            positions = memory.positions
        else:
            memory = memory.zero_filled(lengths.mem_len) if self.config.zero_memory else memory
            pasts, positions = memory.layers, encode(memory.length + x.shape[1])
        inputs = []
        again = self.recompute and torch.is_grad_enabled()
        call = partial(checkpoint, use_reentrant=False) if again else DecoderLayer.__call__
        for layer, past, r, *biases in zip(self.layers, pasts, positions, *self._biases(), strict=True):
            inputs.append(x)
            x = call(layer, x, past, r, *biases, attn_len=lengths.attn_len, valid=memory.valid)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self.dropout(x), memory.extend(inputs, mem_len=lengths.mem_len)

    def _positions(self, length: int, *, clamp_len: int | None, like: Tensor) -> Iterator[Float[Tensor, "H S K"]]:
        encodings = sinusoids(length, self.config.d_model, clamp_len=clamp_len, device=like.device, dtype=like.dtype)
        encodings = self.dropout(encodings)
        return (attention.positions(encodings) for attention in self._attentions)

    def empty_memory(self, batch: int, valid: Int[Tensor, " B"] | None = None) -> Memory:
        """The state before the first token of `batch` streams; see `Memory` for `valid`."""
        assert valid is None or self.takes_padding, "give rows of one length"
        u = self.content_bias
        return Memory.empty(len(self.layers), batch, self.config.d_model, valid=valid, dtype=u.dtype, device=u.device)

    def for_inference(self, precision: str = "fp32") -> TransformerXL:
        """A copy to evaluate with: no dropout, the backend for inference, and the same weights, but that for bf16 those
        of products are rounded once instead of in every call. It is to be called under `device.autocast`."""
        copied = deepcopy(self, {id(p): p for p in self.parameters()})
        if precision == "bf16":
            # Looked up, not multiplied, the embedding's tables stay as they are, and the softmax gets its own.
            copied.softmax = deepcopy(copied.softmax, {id(p): p for p in self.parameters()})
            copied.softmax.tied = False
            linear = (module for module in copied.modules() if isinstance(module, nn.Linear))
            for module in (*linear, copied.softmax, copied.embedding.projections):
                for owner in module.modules():
                    for name, p in list(owner.named_parameters(recurse=False)):
                        if p.dtype == torch.float32 and not (owner is copied.softmax and name.endswith("bias")):
                            setattr(owner, name, nn.Parameter(p.detach().bfloat16(), requires_grad=False))
        for attention in copied._attentions:
            attention.backend = "auto"
        return copied.eval()

    def empty_cache(self, batch: int, lengths: Lengths, valid: Int[Tensor, " B"] | None = None) -> KVCache:
        """`empty_memory` for inference at these lengths: what was read is projected once."""
        return self.cached(self.empty_memory(batch, valid), lengths)

    @torch.no_grad()
    def cached(self, memory: Memory, lengths: Lengths) -> KVCache:
        """A memory as the cache that gives the same numbers, in the precision it is made in."""

        def project(layers: Iterable[Float[Tensor, "B M D"]]) -> Iterator[tuple[Tensor, Tensor]]:
            return (layer.keys_values(past) for layer, past in zip(self._attentions, layers, strict=True))

        if not self.config.zero_memory:
            return KVCache.of(project(memory.layers), lengths, valid=memory.valid)
        memory = memory.zero_filled(lengths.mem_len)
        cache = KVCache.of(project(memory.layers), lengths, valid=memory.valid)
        cache.ground = [(k[0], v[0]) for k, v in project(x.new_zeros(1, 1, x.shape[2]) for x in memory.layers)]
        return cache

    @property
    def _attentions(self) -> list[RelativeMultiheadAttention]:
        return [module for module in self.modules() if isinstance(module, RelativeMultiheadAttention)]

    def _biases(self):
        shape = (len(self.layers), -1, -1)
        return self.content_bias.expand(shape), self.position_bias.expand(shape)
