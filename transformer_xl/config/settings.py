"""Everything a recipe can set, as plain dataclasses. Nothing here imports torch, so `txl --help` starts at once.

`TransformerXLConfig` sets the shape of the weights and `Lengths` the lengths of one call. The other sections set the
text, the training and the scoring. A recipe is a TOML file with one table per section of `RunConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from .problems import Problem, out_of_bounds, refuse_settings

Found = Iterator[Problem]


_LONGEST, _HIGHEST = 1 << 31, 10**30


class _Checked:
    """Base class of groups of settings. The constructor refuses values that are wrong or do not fit each other.

    Raises:
        WrongSettings: lists every problem, a line each.
    """

    def __post_init__(self) -> None:
        refuse_settings(self._problems())

    def _problems(self) -> Found:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(_Checked):
    """The shape of the weights. The defaults are the same as in the original PyTorch code (`train.py`)."""

    vocab_size: int
    """Number of tokens in the vocabulary. 0 in a recipe: the size of the corpus's vocabulary."""
    kind: Literal["transformer-xl", "shaw", "vaswani", "al-rfou", "lstm", "qrnn"] = "transformer-xl"
    """transformer-xl; a baseline of the paper: learned relative positions (shaw), sinusoids added to the embedding
    (vaswani) or learned positions in every layer (al-rfou); or a recurrent network (lstm, qrnn)."""
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
    """Number of learned encodings in a layer. shaw: of distances, and greater distances use the last one; al-rfou: of
    positions in a segment."""
    intermediate_losses: bool = False
    """al-rfou: lower layers predict the target too, and stop one after another in the first half of training."""
    multiple_targets: bool = False
    """al-rfou: in training, a second softmax predicts the token after the target; its loss has weight 0.5."""
    pre_lnorm: bool = False
    """Normalise the input of each sublayer instead of the sum after it."""
    final_norm: bool = False
    """Add a norm after the last layer (the original code has none, even with pre_lnorm)."""
    qk_norm: bool = False
    """Normalise the queries and keys of each head (Dehghani et al. 2023, arXiv 2302.05442), with one learned gain a
    layer."""
    ngrams: tuple[int, ...] = ()
    """The model adds a hashed embedding of the last n tokens to each token's embedding, for each n in this list, for
    example 2 3 4. Empty: it adds nothing."""
    ngram_rows: int = 65_536
    """Number of embeddings of each n. Several n-grams share one by chance."""
    ngram_width: int = 64
    """Width of these embeddings, which are projected to d_model."""
    ngram_dropout: float = 0.0
    """Share of them that are zero in training; for texts that are read several times."""
    layer_norm_epsilon: float = 1e-5
    embedding_scale: float | None = None
    """Factor on embeddings; None: sqrt(d_model)."""
    zero_memory: bool = False
    """Fill a short memory with zeros that are attended, as the TensorFlow and Hugging Face code does."""
    dropout: float = 0.0
    dropatt: float = 0.0
    """Dropout on attention probabilities."""
    dropout_words: float = 0.0
    """Share of the vocabulary whose embeddings are zero in a forward pass, at every position."""
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

    def _problems(self) -> Found:
        sizes = ("n_layer", "n_head", "d_head", "d_model", "d_inner", "d_embed", "div_val")
        shares = ("dropout", "dropatt", "dropout_words", "weight_drop", "dropout_input", "dropout_output")
        yield from out_of_bounds(self, *sizes, least=1)
        yield from out_of_bounds(self, "n_layer", most=10_000)
        yield from out_of_bounds(self, *sizes[1:], "positions", most=1 << 24)
        yield from out_of_bounds(self, "vocab_size", "init_std", "proj_init_std", least=0)
        yield from out_of_bounds(self, *shares, "ngram_dropout", least=0, below=1)
        yield from out_of_bounds(self, "layer_norm_epsilon", above=0)
        yield from out_of_bounds(self, "ngram_rows", least=1, most=1 << 31)
        yield from out_of_bounds(self, "ngram_width", least=1, most=1 << 24)
        if any(a >= b for a, b in pairwise((0, *self.ngrams, 65))):
            yield Problem(("ngrams",), f"{{}} must increase from at least 1 to at most 64, got {list(self.ngrams)}.")
        for name in ("ngram_rows", "ngram_width", "ngram_dropout") if not self.ngrams else ():
            if getattr(self, name) != getattr(TransformerXLConfig, name):
                yield Problem(
                    (name, "ngrams"), "{} is for models with {}, for example 2 3 4. Give both or leave it out."
                )
        if self.d_model % 2:
            sentence = f"{{}} must be even, because half of a position's encoding is sines, got {self.d_model}."
            yield Problem(("d_model",), sentence)
        yield from self._problems_of_bands()
        yield from self._problems_of_kind()

    def _problems_of_bands(self) -> Found:
        edges, bands = (0, *self.cutoffs), len(self.cutoffs) + 1
        if any(a >= b for a, b in pairwise(edges)):
            yield Problem(("cutoffs",), f"{{}} must increase from above 0, got {list(self.cutoffs)}.")
        elif self.cutoffs and self.vocab_size and self.cutoffs[-1] >= self.vocab_size:
            sentence = f"{{}} must be below {{}} = {self.vocab_size}, got {list(self.cutoffs)}."
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

    def _problems_of_kind(self) -> Found:
        for name, kinds in _OF_KINDS.items():
            if getattr(self, name) and self.kind not in kinds:
                sentence = f"{{}} is for kind = {' and '.join(kinds)}, got {{}} = {self.kind}. Leave it out."
                yield Problem((name, "kind"), sentence)
        if self.share_position_projection and self.untie_r:
            sentence = "{} must be false where {} is true, because the biases come from the projection."
            yield Problem(("untie_r", "share_position_projection"), sentence)
        given = [name for name in _ATTENTION if getattr(self, name) != getattr(TransformerXLConfig, name)]
        if self.kind in _RECURRENT and given:
            names = ", ".join(["{}"] * len(given))
            sentence = f"{names} must be left out for {{}} = {self.kind}, which has no attention and no norm."
            yield Problem((*given, "kind"), sentence)
        if self.kind in ("shaw", "al-rfou") and self.positions < 1:
            sentence = f"{{}} must be at least 1, got {self.positions}, for {{}} = {self.kind}."
            yield Problem(("positions", "kind"), sentence)
        yield from out_of_bounds(self, "positions", least=0)

    @property
    def embed_width(self) -> int:
        return self.d_model if self.d_embed is None else self.d_embed

    @property
    def input_scale(self) -> float:
        """The factor on embeddings."""
        if self.embedding_scale is not None:
            return self.embedding_scale
        return 1.0 if self.kind in _RECURRENT else self.d_model**0.5


_RECURRENT = ("lstm", "qrnn")
_ATTENTION = (
    *("n_head", "d_head", "pre_lnorm", "final_norm", "layer_norm_epsilon"),
    *("zero_memory", "dropatt", "init_std", "qk_norm"),
)
"""Settings that recurrent networks do not use."""
_OF_KINDS = {
    "untie_r": ("transformer-xl",),
    "share_position_projection": ("transformer-xl",),
    "ngrams": ("transformer-xl",),
    "weight_drop": _RECURRENT,
    "positions": ("shaw", "al-rfou"),
    "intermediate_losses": ("al-rfou",),
    "multiple_targets": ("al-rfou",),
}
"""Settings that only some kinds of models have."""


GONE = {("model", "score_biases"): False}
"""Settings of former versions, and the only value with which a file that has them is still read."""


@dataclass(frozen=True, kw_only=True)
class Lengths(_Checked):
    """Lengths of one forward pass, in tokens. They never change the shape of the weights."""

    tgt_len: int
    """Tokens per segment."""
    mem_len: int
    """Tokens of memory before each segment; 0 switches recurrence off."""
    clamp_len: int | None = None
    """Largest distance; greater ones are encoded as this one."""
    attn_len: int | None = None
    """Number of keys that a query attends to, including its own; None: all."""

    def _problems(self) -> Found:
        return _length_problems(self)


def _length_problems(lengths: Any) -> Found:
    yield from out_of_bounds(lengths, "tgt_len", "clamp_len", "attn_len", least=1)
    yield from out_of_bounds(lengths, "mem_len", least=0)
    yield from out_of_bounds(lengths, "tgt_len", "mem_len", "clamp_len", most=_LONGEST)
    attn_len, mem_len = lengths.attn_len, lengths.mem_len
    if attn_len is not None and mem_len is not None and attn_len > mem_len + 1:
        sentence = (
            f"{{}} must be at most {{}} + 1 = {mem_len + 1}, got {attn_len}: the first query of a segment sees no "
            f"more. Raise mem_len to {attn_len - 1}, or lower attn_len."
        )
        yield Problem(("attn_len", "mem_len"), sentence)


def _context_problems(lengths: Any) -> Found:
    yield from out_of_bounds(lengths, "context_len", least=0)
    if lengths.context_len and lengths.mem_len:
        sentence = f"{{}} must be 0 where {{}} is given, which replaces the memory, got {lengths.mem_len}."
        yield Problem(("mem_len", "context_len"), sentence)


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(_Checked):
    """The text and its tokens."""

    name: str = ""
    """A corpus that `txl data NAME` prepared, or a text file or folder."""
    unit: Literal["byte", "char", "word", "bpe"] = "byte"
    newlines: Literal["drop", "keep", "sentence"] = "keep"
    """drop: remove line ends, as in the published enwik8 (204 byte values; "keep" has 205). sentence (words only): put
    each line between two <S>, of which the first is context only (lm1b)."""
    shuffle_lines: bool = False
    """Shuffle the lines of the training split in each epoch, with train.seed (lm1b)."""
    reset_documents: bool = False
    """Start each file of a folder with an empty memory. By default the files are joined in the order of their names."""
    min_count: int = 1
    """Words that occur fewer times than this in the training split become <unk>."""
    vocab: str = ""
    """A file with the vocabulary: one word per line, with or without a count after it; for bpe a tokenizer.json."""
    bpe_size: int = 8192
    """For unit bpe: size of the vocabulary to make."""

    def _problems(self) -> Found:
        yield from out_of_bounds(self, "min_count", least=1)
        yield from out_of_bounds(self, "bpe_size", least=257)
        if self.newlines == "sentence" and self.unit != "word":
            sentence = f'{{}} must be "keep" or "drop" for {{}} = "{self.unit}", got "sentence", which is for words.'
            yield Problem(("newlines", "unit"), sentence)
        if self.shuffle_lines and self.newlines == "drop":
            sentence = '{} must be "keep" or "sentence" where {} is true, got "drop", which leaves no lines.'
            yield Problem(("newlines", "shuffle_lines"), sentence)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(_Checked):
    """How to train. A step is an optimizer step over batch_size x tgt_len tokens."""

    tgt_len: int = 128
    mem_len: int = 128
    clamp_len: int | None = None
    attn_len: int | None = None
    context_len: int = 0
    """Number of earlier tokens that each segment reads again, with gradient and without loss. Replaces the memory."""
    random_tgt_len: bool = False
    """Draw each segment length near tgt_len, or with probability 1/20 near half of it; lr scales with the length."""
    batch_size: int = 32
    """Number of streams (rows of a batch)."""
    batch_chunk: int = 1
    """To save memory, split a batch into this many chunks and add their gradients."""
    loss: Literal["full", "half"] = "full"
    """half: train only on the second half of each segment's targets, as in the paper's ablations."""
    max_steps: int = 1000
    optimizer: Literal["adam", "adamw", "sgd", "muon"] = "adam"
    """muon: Muon for the matrices of the layers, AdamW for all other weights."""
    lr: float = 2.5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    """Momentum of SGD and Muon."""
    schedule: Literal["cosine", "linear", "inv_sqrt", "constant"] = "cosine"
    cooldown: float = 1.0
    """linear: the learning rate is constant, then falls along a line in this last share of the steps."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    min_lr_ratio: float = 0.0
    """The final learning rate of the cosine and of the line, as a share of lr."""
    embedding_lr_ratio: float = 1.0
    """Factor on the learning rate of the embedding tables. It does not apply to the final rate of cosine and line."""
    ngram_lr_ratio: float = 10.0
    """The same factor for the n-gram table, whose Adagrad needs a high rate."""
    average_from: int = 0
    """Step at which the schedule ends and a running average of the weights begins. From then on the average is scored
    and saved. 0: no average."""
    average_lr_ratio: float = 0.5
    """The learning rate while averaging, as a share of the schedule's final rate."""
    ar_alpha: float = 0.0
    """Activation regularisation: add this times the mean square of the last layer's output to the loss."""
    tar_beta: float = 0.0
    """Temporal activation regularisation: the same for the change of the output between neighbouring positions."""
    clip: float = 0.25
    """Largest global gradient norm, without the embeddings of n-grams; 0 switches clipping off."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ...; other devices are refused, because they were never tested."""
    backend: str = "auto"
    """Implementation of the attention op; `txl env` lists them."""
    compile: bool = False
    """Compile the model with torch.compile; on a CPU this needs a C++ compiler."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How ranks hold the weights. ddp: each rank holds all of them; fsdp: each rank holds a shard (FSDP2)."""
    recompute: bool = False
    """Recompute each layer in the backward pass instead of storing its activations: less memory, more time."""
    seed: int = 1111
    log_every: int = 50
    eval_every: int = 1000
    """Steps between scores of the validation split; 0: only at the end."""
    eval_tokens: int = 0
    """Number of targets of the validation split to score each time; 0: all."""
    save_every: int = 1000
    keep: int = 2
    """Number of recent checkpoints to keep besides the best one."""
    sample_every: int = 0
    """Steps between text samples; 0: none."""
    sample_tokens: int = 200
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that receive the metrics in addition to metrics.jsonl; each needs an extra package."""

    def _problems(self) -> Found:
        yield from _length_problems(self)
        counts = ("batch_size", "batch_chunk", "max_steps", "log_every", "keep", "sample_tokens")
        steps = ("warmup_steps", "eval_every", "eval_tokens", "save_every", "sample_every", "average_from")
        rates = ("clip", "weight_decay", "lr", "average_lr_ratio", "ar_alpha", "tar_beta", "epsilon")
        yield from out_of_bounds(self, *counts, least=1)
        yield from out_of_bounds(self, *steps, *rates, least=0)
        yield from out_of_bounds(self, "embedding_lr_ratio", "ngram_lr_ratio", above=0)
        yield from out_of_bounds(self, "min_lr_ratio", "momentum", "betas", least=0, below=1)
        yield from out_of_bounds(self, *rates, "embedding_lr_ratio", "ngram_lr_ratio", most=_HIGHEST)
        yield from _context_problems(self)
        if not 0 < self.cooldown <= 1:
            yield Problem(("cooldown",), f"{{}} must be above 0 and at most 1, got {self.cooldown}.")
        if self.cooldown != 1 and self.schedule != "linear":
            sentence = f"{{}} is for {{}} = linear, got {self.schedule}. Leave it out."
            yield Problem(("cooldown", "schedule"), sentence)
        if self.average_from and self.schedule in ("cosine", "linear") and not self.min_lr_ratio:
            sentence = "{} must be above 0 where {} is given, because weights that no longer change need no average."
            yield Problem(("min_lr_ratio", "average_from", "schedule"), sentence)
        if self.parallel == "fsdp" and (self.compile or self.average_from):
            sentence = "{} and {} must be left out with {} = fsdp, which splits the weights. Use ddp."
            yield Problem(("compile", "average_from", "parallel"), sentence)
        if self.batch_chunk > 0 and self.batch_size % self.batch_chunk:
            sentence = f"{{}} must be a multiple of {{}} = {self.batch_chunk}, got {self.batch_size}."
            yield Problem(("batch_size", "batch_chunk"), sentence)

    @property
    def lengths(self) -> Lengths:
        return Lengths(tgt_len=self.tgt_len, mem_len=self.mem_len, clamp_len=self.clamp_len, attn_len=self.attn_len)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(_Checked):
    """How to score a trained model. A length of None means the length of training."""

    split: Literal["train", "valid", "test"] = "test"
    tgt_len: int | None = None
    mem_len: int | None = None
    clamp_len: int | None = None
    attn_len: int | None = None
    context_len: int | None = None
    """None: as in train if mem_len is 0, otherwise 0."""
    batch_size: int = 10
    max_tokens: int = 0
    """Score at most this many tokens of the split; 0: all."""

    def _problems(self) -> Found:
        yield from _length_problems(self)
        yield from _context_problems(self)
        yield from out_of_bounds(self, "batch_size", least=1)
        yield from out_of_bounds(self, "max_tokens", least=0)


@dataclass(frozen=True, kw_only=True)
class RunConfig(_Checked):
    """All settings of a run; its folder has them in `config.toml`."""

    model: TransformerXLConfig = field(default_factory=lambda: TransformerXLConfig(vocab_size=0))
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def _problems(self) -> Found:
        kind, places = f"{{}} = {self.model.kind}", self.model.positions
        if self.model.ngrams and self.train.parallel == "fsdp":
            sentence = "{} must be left out with {} = fsdp, which cannot split gradients of a few rows. Use ddp."
            yield Problem(("model.ngrams", "train.parallel"), sentence)
        if self.train.ngram_lr_ratio != TrainConfig.ngram_lr_ratio and not self.model.ngrams:
            sentence = "{} is for models with {}, for example 2 3 4. Give both or leave it out."
            yield Problem(("train.ngram_lr_ratio", "model.ngrams"), sentence)
        yield from self._problems_of_recurrent()
        if self.model.kind not in ("vaswani", "al-rfou"):
            return
        for name in ("ar_alpha", "tar_beta") if self.model.kind == "al-rfou" else ():
            if getattr(self.train, name):
                sentence = f"{{}} must be 0 for {kind}, which has losses of its own."
                yield Problem((f"train.{name}", "model.kind"), sentence)
        if self.train.random_tgt_len and places:
            sentence = f"{{}} must be false for {kind}, whose positions end. Leave it out."
            yield Problem(("train.random_tgt_len", "model.kind"), sentence)
        for section, lengths in (("train", self.train), ("eval", self.eval)):
            if lengths.clamp_len is not None:
                sentence = f"{{}} is for distances, and {kind} has positions. Leave it out."
                yield Problem((f"{section}.clamp_len", "model.kind"), sentence)
            width = (lengths.tgt_len or 0) + (lengths.context_len or 0)
            if places and width > places:
                sentence = f"{{}} must be at most {{}} = {places}, {{}} included, got {width}. Lower it."
                yield Problem((f"{section}.tgt_len", "model.positions", f"{section}.context_len"), sentence)

    def _problems_of_recurrent(self) -> Found:
        for section in ("train", "eval") if self.model.kind in _RECURRENT else ():
            for name in ("clamp_len", "attn_len"):
                if getattr(getattr(self, section), name) is not None:
                    sentence = f"{{}} must be left out for {{}} = {self.model.kind}, which has no attention."
                    yield Problem((f"{section}.{name}", "model.kind"), sentence)

    @property
    def eval_lengths(self) -> Lengths:
        """The lengths of `eval`; where one is None, the length of `train`."""
        names = ("tgt_len", "mem_len", "clamp_len", "attn_len")
        asked = {name: getattr(self.eval, name) for name in names}
        if self.eval.context_len:
            asked["mem_len"] = 0
        return Lengths(**{name: getattr(self.train, name) if asked[name] is None else asked[name] for name in names})

    def writing_lengths(self, lengths: Lengths) -> Lengths:
        """The lengths for generating text. Without a memory, a segment includes the context that is read again."""
        return replace(lengths, tgt_len=lengths.tgt_len + self.context_len(lengths))

    def context_len(self, lengths: Lengths) -> int:
        """Number of tokens to read again with each segment at these lengths; 0 if there is a memory."""
        if lengths.mem_len:
            return 0
        return self.train.context_len if self.eval.context_len is None else self.eval.context_len
