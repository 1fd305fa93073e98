"""Transformer-XL (Dai et al., ACL 2019): embedding, layers with a memory, softmax.

    nll, memory = model(ids, targets, memory, lengths)

The state is an argument and a return value; no layer keeps anything between calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import TypeVar

from ..config.settings import Lengths, TransformerXLConfig
from ..config.shape import ABSOLUTE, own_kinds
from ..mistake import Mistake
from ..ops.call import product_dtype
from ..ops.dropout import Dropout
from ..ops.masks import Bounds
from .adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from .attention import Positions, RelativeMultiheadAttention, project_together, sinusoids
from .inference import KVCache, check_state
from .memory import Memory, first_keys
from .modules import Ids, Layers, Past, RowLinear, SharedWeights, Valid, Vectors, check_vectors, has_hooks
from .ngrams import NgramEmbedding
from .sublayer import FeedForward, Sublayer

State = TypeVar("State", Memory, KVCache, default=Memory)


class DecoderLayer(nn.Module):
    """Attention over memory and segment, then feed-forward."""

    def __init__(
        self,
        config: TransformerXLConfig,
        backend: str = "auto",
        attention_class: type[RelativeMultiheadAttention] = RelativeMultiheadAttention,
    ):
        super().__init__()
        self.attention: RelativeMultiheadAttention = attention_class(config, backend)
        self.feed_forward: FeedForward = FeedForward(config, backend)

    def forward(
        self,
        x: Vectors,
        past: Past,
        positions: Positions | None,
        *,
        attn_len: int | None = None,
        first: Bounds = None,
    ) -> Vectors:
        """`past` is the layer's earlier inputs, or a cache of their keys and values. `positions` are the encodings and
        biases. For `attn_len` and `first` see the op."""
        return self.feed_forward(self.attention(x, past, positions, attn_len, first))


class TransformerXLBackbone(nn.Module):
    """The layers alone, from vectors to vectors, with a memory of earlier segments. It suits any sequence.

        outputs, memory = backbone(x, memory, lengths)

    `config.vocab_size` has no effect and may be 0. `VectorStep` reads one vector at a time.
    With `recompute` the forward pass keeps only the inputs of each layer, and backward computes the layer again.
    A class of your own overrides `layer_class`, `attention_class`, `encodings`, `positions` or `remember`
    (docs/extend.md).
    """

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    attention_class: ClassVar[type[RelativeMultiheadAttention]] = RelativeMultiheadAttention

    def __init__(
        self, config: TransformerXLConfig, *, backend: str = "auto", recompute: bool = False, draw: bool = True
    ):
        """With `draw` False the caller initialises the weights."""
        super().__init__()
        if type(self) is TransformerXLBackbone and config.base_kind != "transformer-xl":
            raise Mistake(f"kind = {config.kind} has another backbone. Build the model with build_model(config).")
        self.config: TransformerXLConfig = config
        self.recompute: bool = recompute
        self.takes_padding: bool = not config.zero_memory
        """Whether rows may have padding on the left. With `zero_memory` they may not: zeros come before the row."""
        self.layers: Layers[DecoderLayer] = Layers(
            self.layer_class(config, backend, attention_class=self.attention_class) for _ in range(config.n_layer)
        )
        if config.base_kind == "transformer-xl" and not config.share_position_projection:
            biases = (config.n_layer if config.untie_r else 1, config.n_head, config.d_head)
            self.content_bias: nn.Parameter = nn.Parameter(torch.empty(biases))
            self.position_bias: nn.Parameter = nn.Parameter(torch.empty(biases))
        self.final_norm: nn.LayerNorm | None = None
        if config.final_norm:
            self.final_norm = nn.LayerNorm(config.d_model, config.layer_norm_epsilon)
        dropout = config.dropout if config.dropout_input is None else config.dropout_input
        self.dropout: Dropout = Dropout(dropout, locked=config.locked_dropout)
        self.add_weights(config)
        for name, weight in self.named_parameters() if draw else ():
            self.init_weight(name, weight)

    def add_weights(self, config: TransformerXLConfig) -> None:
        """Weights of a subclass. Here there are none."""

    def forward(
        self, x: Vectors, memory: State | None, lengths: Lengths, begins: Bool[Tensor, "B T"] | None = None
    ) -> tuple[list[Vectors], State]:
        """The output of every layer, and the memory for the next segment.

        The call attends to the whole given memory (within `attn_len`). It returns the memory extended by this segment
        and cut to `mem_len`. `final_norm` applies to the last output only. Where a vector `begins` a document or
        episode, it and what follows see nothing before it, as after `memory.reset`.
        """
        check_vectors(x, self.like)
        state: Any = self.empty_memory(x.shape[0], lengths) if memory is None else memory
        heads = self.config.n_head, self.config.d_head
        check_state(state, [self.config.d_model] * len(self.layers), x, heads)
        state = state.grow_to(lengths.mem_len) if self.config.zero_memory else state
        if begins is not None and (self.config.zero_memory or self.config.base_kind in ABSOLUTE):
            raise Mistake(
                "begins must be left out with zero_memory, whose zeros come before a row, and for vaswani and al-rfou, "
                f"whose positions count from its start; got kind = {self.config.kind}."
            )
        if begins is not None and (begins.dtype != torch.bool or begins.shape != x.shape[:2]):
            got = f"{list(begins.shape)} {begins.dtype}"
            raise Mistake(f"begins must be true or false for each vector, {list(x.shape[:2])}, got {got}.")
        x = self.dropout(x)
        first = first_keys(state.length, state.valid, begins if x.shape[1] else None)
        pasts, positions = self.context(state, x, lengths)
        recompute = self.recompute and torch.is_grad_enabled()
        inputs, outputs = [], []
        for number, (layer, past, own) in enumerate(zip(self.layers, pasts, positions, strict=True)):
            x = self.layer_input(number, x, state.valid)
            inputs.append(x)
            read = partial(checkpoint, layer, use_reentrant=False) if recompute else layer
            x = read(x, past, own, attn_len=lengths.attn_len, first=first)
            outputs.append(x)
        if self.final_norm is not None:
            outputs[-1] = self.final_norm(x)
        if begins is not None and first is not None:  # what is before the last document counts no more
            state = state.with_valid(state.length - first[:, -1])
        return outputs, self.remember(state, inputs, lengths)

    if TYPE_CHECKING:

        def __call__(
            self, x: Tensor, memory: State | None, lengths: Lengths, begins: Tensor | None = None
        ) -> tuple[list[Vectors], State]: ...

    def context(
        self, state: Memory | KVCache, x: Vectors, lengths: Lengths
    ) -> tuple[Sequence[Past], Iterable[Positions | None]]:
        """For each layer: its earlier inputs, or their keys and values; and its positions."""
        if isinstance(state, Memory):
            length = max(state.layers[0].shape[1] + x.shape[1], 1)  # a call of no tokens has distance 0, too
            return state.layers, self.positions(length, lengths.clamp_len, x)
        reach = state.begin(x.shape[1], lengths)
        if state.reach < reach:
            state.keep_positions(self.positions(reach, lengths.clamp_len, x), reach)
        return state.pasts, state.positions

    def layer_input(self, number: int, x: Vectors, valid: Valid) -> Vectors:
        """What layer `number` reads and memory keeps: the output of the layer before it. A baseline adds positions."""
        return x

    def remember(self, state: State, inputs: list[Vectors], lengths: Lengths) -> State:
        """The state after a segment with these inputs of each layer: the newest `mem_len` positions (section 3.2)."""
        return state.extend(inputs, mem_len=lengths.mem_len)

    def encodings(self, length: int, clamp_len: int | None, like: Tensor) -> Float[Tensor, "R D"]:
        """The encodings of the distances length - 1, ..., 0, before each layer projects them: sinusoids."""
        return sinusoids(length, self.config.d_model, clamp_len=clamp_len, device=like.device, dtype=like.dtype)

    def positions(self, length: int, clamp_len: int | None, like: Tensor) -> Iterable[Positions | None]:
        """For each layer: the encodings of the distances length - 1, ..., 0, and the biases u and v.

        They are computed when the layer needs them.
        """
        encodings = self.dropout(self.encodings(length, clamp_len, like))
        encodings = encodings.to(product_dtype(encodings))  # once, not in each layer
        if self.config.share_position_projection:
            return (layer.attention.positions(encodings) for layer in self.layers)
        biases = [bias.expand(len(self.layers), -1, -1) for bias in (self.content_bias, self.position_bias)]
        attentions = [layer.attention for layer in self.layers]
        layers = zip(attentions, *biases, project_together(attentions, encodings), strict=True)
        return (attention.positions(encodings, u, v, *r) for attention, u, v, r in layers)

    def init_weight(self, name: str, weight: Tensor) -> None:
        """Initialise as the original code: gains of norms N(1, init_std), biases 0, biases of gates `gate_bias`, all
        others (u and v too) N(0, init_std)."""
        if name.endswith("gate_bias"):
            nn.init.constant_(weight, self.config.gate_bias)
        elif name.endswith(".bias"):
            nn.init.zeros_(weight)
        else:
            nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, self.config.init_std)

    @property
    def like(self) -> Float[Tensor, " D"]:
        """A weight with the dtype and device that inputs must have. `for_inference` does not round norms."""
        layer = next(iter(self.layers))
        return (layer.feed_forward if hasattr(layer.feed_forward, "norm") else layer.attention).norm.weight

    def empty_memory(self, batch: int, lengths: Lengths, valid: Valid = None) -> Memory:
        """The state before the first position of `batch` rows; see `Memory` for `valid`."""
        if valid is not None and not self.takes_padding:
            raise Mistake("This model takes no padding (zero_memory). Give rows of one length, and leave valid out.")
        mem_len, like = lengths.mem_len if self.config.zero_memory else 0, self.like
        shape = (batch, mem_len, self.config.d_model)  # under FSDP2 `new_zeros` of a weight would be a shard
        layers = tuple(torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in self.layers)
        return Memory(layers, valid, self.config.zero_memory)

    @torch.no_grad()
    def cached(self, memory: Memory, lengths: Lengths) -> KVCache | Memory:
        """The cache that gives the same numbers as `memory`, in the precision of this call. Classes of your own with
        another `forward` or `remember`, or layers with another `forward`, have none: then it is `memory`."""
        forward = type(self).forward is TransformerXLBackbone.forward or self.config.kind not in own_kinds
        layers = all(type(layer).forward is DecoderLayer.forward for layer in self.layers)
        if not (forward and layers and type(self).remember is TransformerXLBackbone.remember):
            return memory
        memory = memory.grow_to(lengths.mem_len) if self.config.zero_memory else memory
        pairs = zip(self.layers, memory.layers, strict=True)
        buffers = [torch.stack(layer.attention.keys_values(past), 1) for layer, past in pairs]
        zero_kv = None
        if memory.zero_filled:
            zeros = memory.layers[0].new_zeros(1, 1, self.config.d_model)
            zero_kv = [torch.cat(layer.attention.keys_values(zeros)) for layer in self.layers]
        return KVCache(buffers, lengths, memory.length, memory.valid, zero_kv, tokens=memory.tokens)


class Prediction(NamedTuple):
    """The results of one call that an objective needs."""

    nll: Float[Tensor, "B T"]
    features: Vectors
    """The inputs of the softmax."""
    outputs: list[Vectors]
    """The output of every layer."""


def ordered_weights(model: TransformerXL) -> dict[str, nn.Parameter]:
    """Weights by name, the backbone's own first. Weights are initialised and gradient norms are added in this order, so
    the order determines the bits of a seeded or resumed run."""
    own = model.backbone.named_parameters(prefix="backbone", recurse=False)
    return dict([*own, *model.named_parameters()])


class TransformerXL(SharedWeights):
    """A language model: embedding, backbone, softmax. Its state is a `Memory`; None is an empty one."""

    def __init__(
        self,
        config: TransformerXLConfig,
        *,
        backend: str = "auto",
        recompute: bool = False,
        backbone: Callable[..., nn.Module] = TransformerXLBackbone,
    ):
        super().__init__()
        self.config: TransformerXLConfig = config
        self.embedding: AdaptiveEmbedding = AdaptiveEmbedding(config)
        self.ngrams: NgramEmbedding | None = None
        if config.ngram_sizes:
            self.ngrams = NgramEmbedding(config)
        self.backbone: Any = backbone(config, backend=backend, recompute=recompute, draw=False)
        self.takes_padding: bool = self.backbone.takes_padding
        dropout = config.dropout if config.dropout_output is None else config.dropout_output
        self.dropout: Dropout = Dropout(dropout, locked=config.locked_dropout)
        self.softmax: AdaptiveSoftmax = AdaptiveSoftmax(config)
        self.softmax.tie(self.embedding, weight=config.tie_weight, projections=config.tie_projs)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw new initial weights: projections N(0, proj_init_std), biases of the softmax 0, others as in the
        backbone."""
        for name, weight in ordered_weights(self).items():
            if "projections" in name and not name.startswith("backbone."):
                nn.init.normal_(weight, 0.0, self.config.proj_init_std)
            elif "softmax" in name and name.endswith("bias"):
                nn.init.zeros_(weight)
            else:
                self.backbone.init_weight(name, weight)

    def forward(
        self, ids: Ids, targets: Ids, memory: State | None, lengths: Lengths
    ) -> tuple[Float[Tensor, "B T"], State]:
        """Nats of each target (0 where the target is -1: not scored), and the memory for the next segment."""
        prediction, after = self.predict(ids, targets, memory, lengths)
        return prediction.nll, after

    if TYPE_CHECKING:

        def __call__(
            self, ids: Tensor, targets: Tensor, memory: State | None, lengths: Lengths
        ) -> tuple[Float[Tensor, "B T"], State]: ...

    def predict(self, ids: Ids, targets: Ids, memory: State | None, lengths: Lengths) -> tuple[Prediction, State]:
        """Like `forward`, but return all results that an objective needs."""
        outputs, tables, after = self.read(ids, memory, lengths)
        features = self.dropout(outputs[-1])
        if isinstance(self.softmax, AdaptiveSoftmax) and not self.softmax.is_tied(self.embedding):
            tables = None
        return Prediction(self.softmax.nll(features, targets, tables), features, outputs), after

    def hidden(self, ids: Ids, memory: State | None, lengths: Lengths) -> tuple[Vectors, State]:
        """The inputs of the softmax, and the memory for the next segment."""
        outputs, _, after = self.read(ids, memory, lengths)
        return self.dropout(outputs[-1]), after

    def read(
        self, ids: Ids, memory: State | None, lengths: Lengths
    ) -> tuple[list[Vectors], tuple[Tensor, ...] | None, State]:
        """The output of every layer, the tables of the embedding (None if it has hooks), and the memory for the next
        segment. Training, evaluation and generation all call this."""
        x, tables = (self.embedding(ids), None) if has_hooks(self.embedding) else self.embedding.lookup(ids)
        if self.ngrams is not None:
            state: Any = self.empty_memory(ids.shape[0], lengths) if memory is None else memory
            check_state(state, [self.config.d_model] * self.config.n_layer, x)
            x, memory = self.ngrams.add(x, ids, state, lengths.mem_len)
        if self.config.document_end is None:
            outputs, after = self.backbone(x, memory, lengths)
        else:
            outputs, after = self.backbone(x, memory, lengths, ids == self.config.document_end)
        return outputs, tables, after

    def training_nll(
        self, prediction: Prediction, targets: Int[Tensor, "B T"], progress: float
    ) -> Float[Tensor, "B T"]:
        """What training minimises for each target (0 where it is -1), which is its nats. `progress` is the share of
        training that is done. An objective of your own overrides this (docs/extend.md); it has no effect on scores."""
        return prediction.nll

    def log_probs(
        self, ids: Ids, memory: State | None, lengths: Lengths, last: int | None = None
    ) -> tuple[Float[Tensor, "B L V"], State]:
        """Log-probabilities of the token after each position (L = T), or after the `last` positions (L = last)."""
        hidden, after = self.hidden(ids, memory, lengths)
        return self.softmax.log_probs(hidden if last is None else hidden[:, hidden.shape[1] - last :]), after

    def empty_memory(self, batch: int, lengths: Lengths, valid: Valid = None) -> Memory:
        """The state before the first token of `batch` rows; see `Memory` for `valid`."""
        memory = self.backbone.empty_memory(batch, lengths, valid)
        if self.ngrams is None:
            return memory
        return memory.with_tokens(self.ngrams.no_tokens(batch, lengths.mem_len))

    def empty_cache(self, batch: int, lengths: Lengths, valid: Valid = None) -> Any:
        """Like `empty_memory`, for inference at these lengths: keys and values are projected only once."""
        return self.cached(self.empty_memory(batch, lengths, valid), lengths)

    def cached(self, memory: Memory, lengths: Lengths) -> Any:
        """The state for inference that gives the same numbers as `memory`."""
        return self.backbone.cached(memory, lengths)

    def for_inference(self, precision: str = "fp32") -> TransformerXL:
        """A copy for evaluation: no dropout, the backend for inference, and the same weights. Call it under
        `runtime.device.autocast`.

        In half precision, the weights of matrix products are rounded once, not in every call. The embedding's tables
        are not rounded, because they are looked up and not multiplied; the softmax then has its own tables.
        """
        kept: dict[int, Any] = {id(p): p for p in self.parameters()}
        parts = [part for module in self.modules() for part in vars(module).values()]
        # What a pruned layer computed from its weights has a gradient, which PyTorch does not copy; a call renews it.
        kept |= {id(part): part for part in parts if isinstance(part, Tensor) and not part.is_leaf}
        empty = {id(part): type(part)() for part in parts if type(part) in (OrderedDict, dict, set) and not part}
        copied = deepcopy(self, kept | empty)  # to copy a module's dozen empty tables took half of the time
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        if half is not None:
            copied.softmax = deepcopy(copied.softmax, dict(kept))
            owners: list[Any] = [each for each in copied.modules() if type(each) is RowLinear]  # others may be in fp32
            owners += [*copied.softmax.modules(), *copied.embedding.projections.modules()]
            for owner in owners:
                for name, p in list(owner.named_parameters(recurse=False)):
                    if p.dtype == torch.float32 and not (owner is copied.softmax and name.endswith("bias")):
                        setattr(owner, name, nn.Parameter(p.detach().to(half), requires_grad=False))
        for module in copied.modules():
            if isinstance(module, Sublayer):
                module.backend = "auto"
        return copied.eval()
