"""The settings of a model. Like all settings they import no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Literal

from ..mistake import join_words
from .problems import Checked, Problem, out_of_bounds


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(Checked):
    """The settings of a model. The defaults are the same as in the original PyTorch code (`train.py`)."""

    vocab_size: int
    """Number of tokens in the vocabulary. 0 in a recipe: the size of the corpus's vocabulary. A backbone alone has
    none: 0."""
    kind: str = "transformer-xl"
    """transformer-xl; a baseline of the paper: learned relative positions (shaw), sinusoids added to the embedding
    (vaswani) or learned positions in every layer (al-rfou); a recurrent network (lstm, qrnn); or a class of your own
    (docs/extend.md)."""
    n_layer: int = 12
    n_head: int = 10
    d_head: int = 50
    d_model: int = 500
    d_inner: int = 1000
    """Width of the feed-forward layer."""
    d_embed: int | None = None
    """Width of the embedding; None: d_model. An embedding of another width is projected to d_model."""
    cutoffs: tuple[int, ...] = ()
    """Ids at which the frequency bands of the adaptive embedding and softmax end. Empty: not adaptive."""
    div_val: int = 1
    """Band i has width d_embed // div_val**i."""
    tie_weight: bool = True
    """The embedding and the softmax share their tables."""
    tie_projs: tuple[bool, ...] = ()
    """For each band, whether the embedding and the softmax share the projection. Empty: no band does."""
    untie_r: bool = False
    """Each layer has its own content and position biases."""
    share_position_projection: bool = False
    """Positions use the projection of the tokens; the query of distance 0 gives the biases (PTB recipe)."""
    positions: int = 0
    """Number of learned encodings in a layer. shaw: one per distance, the last for all greater ones; al-rfou: one
    per position in a segment."""
    pre_lnorm: bool = False
    """Normalise the input of each sublayer instead of the sum after it."""
    final_norm: bool = False
    """Add a norm after the last layer (the original code has none, even with pre_lnorm)."""
    gate: Literal["none", "input", "output", "highway", "sigmoid-tanh", "gru"] = "none"
    """What joins the input and the output of each sublayer: their sum, or a gate of GTrXL (Parisotto et al. 2019, arXiv
    1910.06764, section 3.2)."""
    gate_bias: float = 2.0
    """Initial bias of the gates; the gate "input" has none. The greater, the less a new model's sublayers change x."""
    relu_output: bool = False
    """Apply a ReLU to each sublayer's output before it is joined (GTrXL; there with pre_lnorm)."""
    qk_norm: bool = False
    """Normalise the queries and keys of each head (Henry et al. 2020, arXiv 2010.04245), one learned gain per
    layer."""
    ngrams: tuple[int, ...] = ()
    """For each n in this list, for example 2 3 4, the model adds a hashed embedding of the last n tokens to the
    embedding of each token. Empty: it adds none."""
    matches: tuple[int, ...] = ()
    """For each n in this list the model adds an embedding of the token that followed the last n tokens when they last
    occurred in the stream (n-gram heads, Akyurek et al. 2024, arXiv 2401.12973). Empty: it adds none."""
    match_window: int = 4096
    """The greatest distance, in tokens, between the last n tokens and their match."""
    ngram_rows: int = 65_536
    """Number of embeddings of the n-grams of each n, of which several share one by chance. Matches have one for each
    token."""
    ngram_width: int = 32
    """Width of the embeddings of n-grams and matches, which are projected to d_model."""
    ngram_dropout: float = 0.0
    """Share of the n-grams, but not of the matches, left out in training; for texts that are read several times."""
    layer_norm_epsilon: float = 1e-5
    embedding_scale: float | None = None
    """Factor on embeddings; None: sqrt(d_model)."""
    document_end: int | None = None
    """The id of corpus.document_end: this token and what follows it see nothing before it."""
    zero_memory: bool = False
    """Fill a short memory with zeros that are attended, as the TensorFlow and Hugging Face code does."""
    dropout: float = 0.0
    dropatt: float = 0.0
    """Dropout on attention probabilities."""
    dropout_words: float = 0.0
    """Share of the vocabulary whose embeddings are dropped in a forward pass, at every position."""
    dropout_input: float | None = None
    """Dropout on embeddings and position encodings; None: the value of dropout."""
    dropout_output: float | None = None
    """Dropout before the softmax; None: the value of dropout."""
    locked_dropout: bool = False
    """All positions of a row share a dropout mask (Gal & Ghahramani 2016), also for queries, keys and values."""
    weight_drop: float = 0.0
    """Dropout on weights. lstm: on the state-to-state matrices; qrnn: on the matrices of the layers."""
    init_std: float = 0.02
    proj_init_std: float = 0.01
    """Standard deviation of the initial projections of adaptive layers."""

    @property
    def base_kind(self) -> str:
        """The packaged kind whose settings this kind has."""
        return own_kinds.get(self.kind, self.kind)

    @property
    def ngram_sizes(self) -> tuple[int, ...]:
        """Number of embeddings of each of `ngrams`, then of each of `matches`: a match is a token or none."""
        return (self.ngram_rows,) * len(self.ngrams) + (self.vocab_size + 1,) * len(self.matches)

    def _problems(self) -> Iterator[Problem]:
        sizes = ("n_layer", "n_head", "d_head", "d_model", "d_inner", "d_embed", "div_val")
        shares = ("dropout", "dropatt", "dropout_words", "weight_drop", "dropout_input", "dropout_output")
        yield from out_of_bounds(self, *sizes, least=1)
        yield from out_of_bounds(self, "n_layer", most=10_000)
        yield from out_of_bounds(self, *sizes[1:], "positions", most=1 << 24)
        yield from out_of_bounds(self, "vocab_size", "init_std", "proj_init_std", least=0)
        yield from out_of_bounds(self, *shares, "ngram_dropout", least=0, below=1)
        yield from out_of_bounds(self, "layer_norm_epsilon", above=0)
        yield from out_of_bounds(self, "ngram_rows", least=1, most=1 << 31)
        yield from out_of_bounds(self, "ngram_width", "match_window", least=1, most=1 << 24)
        yield from out_of_bounds(self, "document_end", least=0, below=self.vocab_size or inf)
        yield from out_of_bounds(self, "gate_bias", least=-100, most=100)
        for name in ("ngrams", "matches"):
            given = getattr(self, name)
            if any(a >= b for a, b in pairwise((0, *given, 65))):
                yield Problem((name,), f"{{}} must increase from at least 1 to at most 64, got {list(given)}.")
        for name, parts in _OF_PARTS.items():
            if getattr(self, name) != getattr(TransformerXLConfig, name) and not any(getattr(self, x) for x in parts):
                yield Problem((name, *parts), needs(*parts))
        if self.d_model % 2:
            sentence = f"{{}} must be even, because half of a position's encoding is sines, got {self.d_model}."
            yield Problem(("d_model",), sentence)
        if self.gate_bias != TransformerXLConfig.gate_bias and self.gate in ("none", "input"):
            kinds = "output, highway, sigmoid-tanh and gru"
            yield Problem(("gate_bias", "gate"), f"{{}} is for gate = {kinds}, got {{}} = {self.gate}. Leave it out.")
        yield from self._problems_of_bands()
        yield from self._problems_of_kind()

    def _problems_of_bands(self) -> Iterator[Problem]:
        edges, bands = (0, *self.cutoffs), len(self.cutoffs) + 1
        if any(a >= b for a, b in pairwise(edges)):
            yield Problem(("cutoffs",), f"{{}} must increase from above 0, got {list(self.cutoffs)}.")
        elif self.cutoffs and self.vocab_size and self.cutoffs[-1] >= self.vocab_size:
            sentence = f"{{}} must be below {{}} = {self.vocab_size}, got {list(self.cutoffs)}. Lower them."
            yield Problem(("cutoffs", "vocab_size"), sentence)
        if not self.cutoffs and self.div_val > 1:
            sentence = f"{{}} must be 1 without {{}}, got {self.div_val}. Give cutoffs, or leave it out."
            yield Problem(("div_val", "cutoffs"), sentence)
        if self.div_val ** len(self.cutoffs) > self.embed_width > 0:
            width = "d_model" if self.d_embed is None else "d_embed"
            sentence = f"{{}} must leave some width for the last of {bands} bands of {{}} = {self.embed_width}, got "
            yield Problem(("div_val", width), f"{sentence}{self.div_val}. Lower it.")
        if self.tie_projs and len(self.tie_projs) != bands:
            sentence = f"{{}} must hold a value for each of the {bands} bands of {{}}, got {len(self.tie_projs)}."
            yield Problem(("tie_projs", "cutoffs"), sentence)

    def _problems_of_kind(self) -> Iterator[Problem]:
        known = (*KINDS, *own_kinds)
        if self.kind not in known:
            yield Problem(
                ("kind",),
                f"{{}} must be one of {', '.join(known)}, got {self.kind}. If it is a kind of your own, run its "
                "register(...) first; for txl, TXL_IMPORT names the Python file that does.",
            )
            return
        yield from of_other_kinds(self, _OF_KINDS, self)
        if self.document_end is not None:
            yield from self.problems_of_ends("document_end", "zero_memory", "kind")
        if self.share_position_projection and self.untie_r:
            sentence = "{} must be false where {} is true, because the biases come from the projection."
            yield Problem(("untie_r", "share_position_projection"), sentence)
        if self.base_kind in ("shaw", "al-rfou") and self.positions < 1:
            sentence = f"{{}} must be at least 1, got {self.positions}, for {{}} = {self.kind}."
            yield Problem(("positions", "kind"), sentence)
        yield from out_of_bounds(self, "positions", least=0)

    def problems_of_ends(self, end: str, zeros: str, kind: str) -> Iterator[Problem]:
        """A problem if this model knows no ends of documents; the arguments are the names of the three settings."""
        if self.base_kind in ABSOLUTE:
            yield Problem((end, kind), f"{{}} cannot be given with {{}} = {self.kind}. Leave it out.")
        elif self.zero_memory:
            yield Problem((end, zeros), "{} cannot be given with {}. Leave one of them out.")

    @property
    def embed_width(self) -> int:
        return self.d_model if self.d_embed is None else self.d_embed

    @property
    def input_scale(self) -> float:
        """The factor on embeddings."""
        if self.embedding_scale is not None:
            return self.embedding_scale
        return 1.0 if self.base_kind in RECURRENT else self.d_model**0.5


_OF_PARTS = {
    "ngram_rows": ("ngrams",),
    "ngram_dropout": ("ngrams",),
    "ngram_width": ("ngrams", "matches"),
    "match_window": ("matches",),
}
"""Settings that only models with n-grams or matches use."""


def needs(*parts: str) -> str:
    """The sentence that refuses a setting because the model has none of these parts."""
    return f"{{}} is for models with {' or '.join('{}' for _ in parts)}, for example 2 3 4. Otherwise leave it out."


KINDS = ("transformer-xl", "shaw", "vaswani", "al-rfou", "lstm", "qrnn")
own_kinds: dict[str, str] = {}
"""The kinds that `register` added, each with its `base_kind`."""
RECURRENT = ("lstm", "qrnn")
ABSOLUTE = ("vaswani", "al-rfou")
"""Kinds of model whose positions count from the start of a segment: they have none beyond their `tgt_len`."""
ATTENTION = KINDS[:4]
_OF_KINDS = {
    **dict.fromkeys(("untie_r", "share_position_projection", "ngrams", "matches"), ("transformer-xl",)),
    **dict.fromkeys(("n_head", "d_head", "pre_lnorm", "final_norm", "layer_norm_epsilon", "zero_memory"), ATTENTION),
    **dict.fromkeys(("dropatt", "init_std", "gate", "gate_bias", "relu_output", "qk_norm"), ATTENTION),
    "weight_drop": RECURRENT,
    "positions": ("shaw", "al-rfou"),
}
"""Settings that only some kinds of models have."""


def of_other_kinds(
    settings: object, kinds_of: Mapping[str, Sequence[str]], model: TransformerXLConfig, form: str = "{}"
) -> Iterator[Problem]:
    """A problem for each setting that is not its default although only other kinds of models have it."""
    for name, kinds in kinds_of.items():
        if model.base_kind not in kinds and getattr(settings, name) != getattr(type(settings), name):
            sentence = f"{{}} is for kind = {join_words(kinds, 'or')}, got {{}} = {model.kind}. Leave it out."
            yield Problem((form.format(name), "kind" if settings is model else "model.kind"), sentence)
