"""Transformer-XL (Dai et al., ACL 2019) on one page: embedding, layers that read a memory, softmax.

    nll, memory = model(ids, targets, memory, lengths)

State goes in and comes out; no layer keeps anything between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config.settings import Lengths, TransformerXLConfig
from ..ops.dropout import Dropout
from .adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from .attention import Linear, RelativeMultiheadAttention, sinusoids
from .inputs import as_targets
from .memory import KVCache, Memory, check_state

State = TypeVar("State", Memory, KVCache)


def mean_nll(nll: Float[Tensor, "B T"], targets: Integer[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Nats per scored target."""
    return nll.sum() / (targets.long() >= 0).sum().clamp(min=1)


def activity(
    output: Float[Tensor, "B T D"], scored: Bool[Tensor, "B T"], *, alpha: float, beta: float
) -> Float[Tensor, ""]:
    """AR and TAR (Merity et al. 2017) where `scored`: `alpha` times the mean square of the output, and `beta` times
    that of its change from one position to the next."""

    def mean_square(x: Float[Tensor, "B L D"], counted: Bool[Tensor, "B L"]) -> Float[Tensor, ""]:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        return (exact.square().mean(-1) * counted).sum() / counted.sum().clamp(min=1)

    change = output[:, 1:] - output[:, :-1]
    return alpha * mean_square(output, scored) + beta * mean_square(change, scored[:, 1:] & scored[:, :-1])


class FeedForward(nn.Module):
    """The position-wise sublayer: norm, two linear layers with a ReLU between, residual."""

    def __init__(
        self,
        d_model: int,
        d_inner: int,
        *,
        dropout: float,
        pre_lnorm: bool,
        layer_norm_epsilon: float,
        locked: bool = False,
    ):
        super().__init__()
        self.pre_lnorm = pre_lnorm
        self.inner = Linear(d_model, d_inner)
        self.outer = Linear(d_inner, d_model)
        self.norm = nn.LayerNorm(d_model, eps=layer_norm_epsilon)
        self.dropout = Dropout(dropout, locked=locked)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        inner = self.dropout(self.inner(self.norm(x) if self.pre_lnorm else x))
        inner = F.relu(inner, inplace=True)  # the same as before dropout, and what backward keeps is one tensor less
        x = x + self.dropout(self.outer(inner))
        return x if self.pre_lnorm else self.norm(x)


class DecoderLayer(nn.Module):
    """Attention over memory and segment, then feed-forward."""

    def __init__(
        self,
        config: TransformerXLConfig,
        backend: str = "auto",
        attention: Callable[..., RelativeMultiheadAttention] = RelativeMultiheadAttention,
    ):
        super().__init__()
        shared = {
            "dropout": config.dropout,
            "pre_lnorm": config.pre_lnorm,
            "layer_norm_epsilon": config.layer_norm_epsilon,
            "locked": config.locked_dropout,
        }
        own = {"share_position": True} if config.share_position_projection else {}
        self.attention = attention(
            config.d_model, config.n_head, config.d_head, dropatt=config.dropatt, backend=backend, **shared, **own
        )
        self.feed_forward = FeedForward(config.d_model, config.d_inner, **shared)

    def forward(self, x, past, positions, content_bias, position_bias, *, attn_len, valid):
        x = self.attention(x, past, positions, content_bias, position_bias, attn_len=attn_len, valid=valid)
        return self.feed_forward(x)


class TransformerXL(nn.Module):
    """A language model whose segments remember the ones before.

    Its state is a `Memory` of `n_layer` layer inputs; None starts with an empty one. With `recompute` each layer is
    computed again in backward, from its inputs, which is all that is kept of it. How it tells positions is said by
    `attention`, `_positions`, `_biases`, `_enter` and `_enter_layer`, which the baselines say otherwise.
    """

    attention: Callable[..., RelativeMultiheadAttention] = RelativeMultiheadAttention
    progress: float = 0.0
    """The share of training that is done, which the trainer tells before a step: `objective` may change with it."""

    def __init__(self, config: TransformerXLConfig, *, backend: str = "auto", recompute: bool = False):
        super().__init__()
        self.config, self.recompute = config, recompute
        self.takes_padding = not config.zero_memory
        """Whether rows of a batch may begin at different places; zeros before the beginning leave no room for that."""
        sizes = (config.vocab_size, config.embed_width, config.d_model)
        bands = {"cutoffs": config.cutoffs, "div_val": config.div_val}
        scale = config.d_model**0.5 if config.embedding_scale is None else config.embedding_scale
        self.embedding = AdaptiveEmbedding(*sizes, scale=scale, dropout_words=config.dropout_words, **bands)
        self.layers = nn.ModuleList(DecoderLayer(config, backend, self.attention) for _ in range(config.n_layer))
        self._add_positional()
        self.final_norm = nn.LayerNorm(config.d_model, config.layer_norm_epsilon) if config.final_norm else None
        ends = (config.dropout if p is None else p for p in (config.dropout_input, config.dropout_output))
        self.dropout, self.dropout_output = (Dropout(p, locked=config.locked_dropout) for p in ends)
        self.softmax = AdaptiveSoftmax(*sizes, **bands)
        self.softmax.tie(self.embedding, weight=config.tie_weight, projections=config.tie_projs)
        self.init_weights()

    def _add_positional(self) -> None:
        """The parameters of positions that are not a layer's own: the paper's u and v."""
        config = self.config
        if config.share_position_projection:
            return
        biases = (config.n_layer if config.untie_r else 1, config.n_head, config.d_head)
        self.content_bias = nn.Parameter(torch.empty(biases))
        self.position_bias = nn.Parameter(torch.empty(biases))

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
        self, ids: Integer[Tensor, "B T"], targets: Integer[Tensor, "B T"], memory: State | None, lengths: Lengths
    ) -> tuple[Float[Tensor, "B T"], State]:
        """Nats of each target, in order (0 where it is -1: not scored), and the memory for the next segment."""
        x, tables = self.embedding.lookup(ids)
        hidden, after = self._read(x, memory, lengths)
        return self.softmax.nll(hidden, targets, tables), after

    def objective(
        self, ids: Integer[Tensor, "B T"], targets: Integer[Tensor, "B T"], memory: State | None, lengths: Lengths
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B T"], State]:
        """What is trained: the mean nll of the scored targets; also what `forward` returns."""
        nll, after = self(ids, targets, memory, lengths)
        return mean_nll(nll, targets), nll, after

    def regularised(
        self,
        ids: Integer[Tensor, "B T"],
        targets: Integer[Tensor, "B T"],
        memory: State | None,
        lengths: Lengths,
        *,
        alpha: float,
        beta: float,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B T"], State]:
        """`objective` with `activity` of the last layer, before dropout, at the scored targets."""
        targets = as_targets(targets, ids.shape)
        x, tables = self.embedding.lookup(ids)
        output, after = self._run(x, memory, lengths)
        output = self._normed(output)
        nll = self.softmax.nll(self.dropout_output(output), targets, tables)
        return mean_nll(nll, targets) + activity(output, targets >= 0, alpha=alpha, beta=beta), nll, after

    def log_probs(
        self, ids: Integer[Tensor, "B T"], memory: State | None, lengths: Lengths, last: int | None = None
    ) -> tuple[Float[Tensor, "B L V"], State]:
        """Log-probabilities of what follows each position (L = T), or only the `last` ones (L = last)."""
        hidden, memory = self.hidden(ids, memory, lengths)
        return self.softmax.log_probs(hidden if last is None else hidden[:, hidden.shape[1] - last :]), memory

    def hidden(
        self, ids: Integer[Tensor, "B T"], memory: State | None, lengths: Lengths
    ) -> tuple[Float[Tensor, "B T D"], State]:
        """Features: the last layer's output. The memory given is attended whole (within `attn_len`) and comes back
        extended by this segment and cut to `mem_len`."""
        return self._read(self.embedding(ids), memory, lengths)

    def _read(
        self, x: Float[Tensor, "B T D"], memory: Any, lengths: Lengths, lower: list[Tensor] | None = None
    ) -> tuple[Float[Tensor, "B T D"], Any]:
        """`hidden` of embedded tokens; a list given as `lower` gets what each layer but the last gave."""
        output, after = self._run(x, memory, lengths, lower)
        return self._features(output), after

    def _run(
        self, x: Float[Tensor, "B T D"], memory: Any, lengths: Lengths, lower: list[Tensor] | None = None
    ) -> tuple[Float[Tensor, "B T D"], Any]:
        """What the last layer gives, and `_read` makes features of."""
        memory = self.empty_memory(len(x)) if memory is None else memory
        check_state(memory, [self.config.d_model] * len(self.layers), x)
        x = self._enter(x, memory.valid, lengths)
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
        layers = zip(self.layers, pasts, positions, *self._biases(lengths.clamp_len), strict=True)
        for number, (layer, past, r, *biases) in enumerate(layers):
            if lower is not None and number:
                lower.append(x)
            x = self._enter_layer(number, x, memory.valid)
            inputs.append(x)
            x = call(layer, x, past, r, *biases, attn_len=lengths.attn_len, valid=memory.valid)
        return x, memory.extend(inputs, mem_len=lengths.mem_len)

    def _features(self, output: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """What the softmax reads of what a layer gives."""
        return self.dropout_output(self._normed(output))

    def _normed(self, output: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return output if self.final_norm is None else self.final_norm(output)

    def _enter(self, x: Float[Tensor, "B T D"], valid: Int[Tensor, " B"] | None, lengths: Lengths) -> Tensor:
        """What the lowest layer gets of the embedded tokens; `valid` as in `Memory`."""
        return self.dropout(x)

    def _enter_layer(self, number: int, x: Float[Tensor, "B T D"], valid: Int[Tensor, " B"] | None) -> Tensor:
        """What a layer reads of what the one below gives; memory holds this."""
        return x

    def _positions(self, length: int, *, clamp_len: int | None, like: Tensor) -> Iterable[Float[Tensor, "H S K"]]:
        """The distances length - 1, ..., 0 as each layer's heads read them."""
        encodings = sinusoids(length, self.config.d_model, clamp_len=clamp_len, device=like.device, dtype=like.dtype)
        encodings = self.dropout(encodings)
        return (attention.positions(encodings) for attention in self._attentions)

    def empty_memory(self, batch: int, valid: Int[Tensor, " B"] | None = None) -> Memory:
        """The state before the first token of `batch` streams; see `Memory` for `valid`."""
        assert valid is None or self.takes_padding, "give rows of one length"
        like: dict[str, Any] = {"dtype": self.softmax.bias.dtype, "device": self.softmax.bias.device}
        return Memory.empty(len(self.layers), batch, self.config.d_model, valid=valid, **like)

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

    def shards(self) -> list[list[nn.Module]]:
        """Groups of modules whose weights are used in their own calls alone, so that each group may be kept in parts
        and gathered for its calls; the rest of the model is a group of its own."""
        if self.config.share_position_projection:  # a layer's projections are used before its call
            return []
        positions = [attention.position for attention in self._attentions if attention.position is not None]
        groups: list[list[nn.Module]] = [[layer] for layer in self.layers]
        return [[*positions], *groups] if positions else groups

    @property
    def _attentions(self) -> list[RelativeMultiheadAttention]:
        return [module for module in self.modules() if isinstance(module, RelativeMultiheadAttention)]

    def _biases(self, clamp_len: int | None) -> tuple[Iterable[Tensor | None], Iterable[Tensor | None]]:
        """Each layer's u, and each layer's v; None where the layer has its own."""
        if self.config.share_position_projection:
            return [None] * len(self.layers), [None] * len(self.layers)
        shape = (len(self.layers), -1, -1)
        return self.content_bias.expand(shape), self.position_bias.expand(shape)
