"""Everything a recipe can set, as plain dataclasses; no torch, so `txl --help` starts at once.

`TransformerXLConfig` shapes the weights and `Lengths` shapes one call; the other sections say which text, how
to train on it and how to score it. A recipe is a TOML file with one table per section of `RunConfig`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal

from ..mistake import Mistake


def _refuse(problems: Iterable[str]) -> None:
    """Raise one `ValueError` that lists every problem found, a line each."""
    found = list(problems)
    if found:
        raise Mistake("\n".join(found))


def _at_least(bound: int, owner: Any, *names: str) -> Iterable[str]:
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < bound:
            yield f"{name} must be at least {bound}, got {value}."


def _at_most(bound: float, owner: Any, *names: str) -> Iterable[str]:
    for name in names:
        if (getattr(owner, name) or 0) > bound:
            yield f"{name} must be at most {bound:,}, got {getattr(owner, name)}."


def _fractions(owner: Any, *names: str) -> Iterable[str]:
    for name in names:
        value = getattr(owner, name)
        if not 0 <= value < 1:
            yield f"{name} must be at least 0 and below 1, got {value}."


class _Checked:
    """Settings that go together: a value that does not is refused as they are made."""

    def __post_init__(self) -> None:
        _refuse(self._problems())

    def _problems(self) -> Iterable[str]:
        """A sentence for each."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(_Checked):
    """The shape of the weights. Defaults are those of the original PyTorch code's `train.py`."""

    vocab_size: int
    """Number of symbols. 0 in a recipe means: as many as the corpus has."""
    kind: Literal["transformer-xl", "shaw", "vaswani", "al-rfou", "lstm", "qrnn"] = "transformer-xl"
    """Transformer-XL, or a baseline of the paper: learned relative positions (Shaw), sinusoids at the bottom (Vaswani),
    learned positions in every layer (Al-Rfou); or a recurrent network."""
    n_layer: int = 12
    n_head: int = 10
    d_head: int = 50
    d_model: int = 500
    d_inner: int = 1000
    """Width of the feed-forward layer."""
    d_embed: int | None = None
    """Width of the embedding; None is d_model. Another width is projected."""
    cutoffs: tuple[int, ...] = ()
    """Ids at which the frequency bands of adaptive embedding and softmax end; none: plain ones."""
    div_val: int = 1
    """Band i is d_embed // div_val**i wide."""
    tie_weight: bool = True
    """Embedding and softmax share their tables."""
    tie_projs: tuple[bool, ...] = ()
    """Per band: softmax and embedding share the projection. Empty: none does."""
    untie_r: bool = False
    """Each layer has content and position biases of its own."""
    share_position_projection: bool = False
    """Positions go through the words' own projection, and the biases are its query of distance 0 (PTB)."""
    positions: int = 0
    """Learned encodings in a layer: of distances (shaw; farther ones use the last), or of positions in a segment
    (al-rfou)."""
    intermediate_losses: bool = False
    """al-rfou: in the first half of training the lower layers predict the target too, fewer and fewer of them."""
    multiple_targets: bool = False
    """al-rfou: while training, a second softmax predicts the token after the next one, at half the weight."""
    pre_lnorm: bool = False
    """Normalise the input of each sublayer, not the sum behind it."""
    final_norm: bool = False
    """One more norm behind the last layer (the original's pre_lnorm has none)."""
    layer_norm_epsilon: float = 1e-5
    embedding_scale: float | None = None
    """Factor on embeddings; None is sqrt(d_model)."""
    zero_memory: bool = False
    """What a memory lacks of mem_len is filled with zeros that are attended, as TensorFlow's and Hugging Face's are."""
    dropout: float = 0.0
    dropatt: float = 0.0
    """Dropout on attention probabilities."""
    dropout_words: float = 0.0
    """The share of words that a call of the model reads as zeros, wherever they stand."""
    dropout_input: float | None = None
    """Dropout on embeddings and encoded positions; None is dropout."""
    dropout_output: float | None = None
    """Dropout before the softmax; None is dropout."""
    locked_dropout: bool = False
    """A mask holds for all positions of a row (Gal & Ghahramani 2016), and there is one on queries, keys and values."""
    weight_drop: float = 0.0
    """lstm: dropout on the matrices from state to state; qrnn: on those of its layers."""
    init_std: float = 0.02
    proj_init_std: float = 0.01
    """Standard deviation at the start for the adaptive layers' projections."""

    def _problems(self) -> Iterable[str]:
        sizes = ("n_layer", "n_head", "d_head", "d_model", "d_inner", "d_embed", "div_val")
        yield from _at_least(1, self, *sizes)
        yield from _at_most(10_000, self, "n_layer")
        yield from _at_most(1 << 24, self, *sizes[1:], "positions")
        yield from _at_least(0, self, "vocab_size")
        yield from _at_least(0, self, "init_std", "proj_init_std")
        yield from _fractions(self, "dropout", "dropatt", "dropout_words", "weight_drop")
        yield from _fractions(self, *(n for n in ("dropout_input", "dropout_output") if getattr(self, n) is not None))
        if not self.layer_norm_epsilon > 0:
            yield f"layer_norm_epsilon must be above 0, got {self.layer_norm_epsilon}."
        if self.d_model % 2:
            yield f"d_model must be even, for sines and cosines share it; got {self.d_model}."
        edges = (0, *self.cutoffs)
        if any(a >= b for a, b in pairwise(edges)):
            yield f"cutoffs must increase from above 0, got {list(self.cutoffs)}."
        elif self.cutoffs and self.vocab_size and self.cutoffs[-1] >= self.vocab_size:
            yield f"cutoffs must be below vocab_size = {self.vocab_size}, got {list(self.cutoffs)}."
        if not self.cutoffs and self.div_val > 1:
            yield f"div_val must be 1 where there are no cutoffs, got {self.div_val}. Give cutoffs, or leave it out."
        if self.div_val ** len(self.cutoffs) > self.embed_width > 0:
            bands = f"{len(self.cutoffs) + 1} bands of d_embed = {self.embed_width}"
            yield f"div_val must leave the last of {bands} some width, got {self.div_val}. Lower it."
        if self.tie_projs and len(self.tie_projs) != len(self.cutoffs) + 1:
            bands = len(self.cutoffs) + 1
            yield f"tie_projs must hold a value for each of the {bands} bands, got {len(self.tie_projs)}."
        for name, kinds in _OF_KINDS.items():
            if getattr(self, name) and self.kind not in kinds:
                yield f"{name} is for kind = {' and '.join(kinds)}, got kind = {self.kind}. Leave it out."
        if self.share_position_projection and self.untie_r:
            yield "untie_r must be false where share_position_projection is true: biases come from the projection."
        strange = [n for n in _ATTENTION if self.kind in _RECURRENT and getattr(self, n) != _default(self, n)]
        if strange:
            yield f"{', '.join(strange)} must be left out for kind = {self.kind}, which has no attention and no norm."
        yield from _at_least(1 if self.kind in ("shaw", "al-rfou") else 0, self, "positions")

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
    *("zero_memory", "dropatt", "init_std"),
)
"""Settings that recurrent networks have no use for."""
_OF_KINDS = {
    "untie_r": ("transformer-xl",),
    "share_position_projection": ("transformer-xl",),
    "weight_drop": _RECURRENT,
    "positions": ("shaw", "al-rfou"),
    "intermediate_losses": ("al-rfou",),
    "multiple_targets": ("al-rfou",),
}
"""Settings that only some kinds of models have."""


GONE = {("model", "score_biases"): False}
"""Settings of former versions, and the one value with which a file that holds them still means the same."""


def _default(owner: Any, name: str) -> Any:
    return next(f.default for f in fields(owner) if f.name == name)


@dataclass(frozen=True, kw_only=True)
class Lengths(_Checked):
    """What shapes one call and never the weights; all counts are tokens."""

    tgt_len: int
    """How callers cut a text into segments."""
    mem_len: int
    """Memory kept behind each segment; 0 switches recurrence off."""
    clamp_len: int | None = None
    """Distances beyond this one are encoded as this one."""
    attn_len: int | None = None
    """How many keys a query sees, itself included; None: all there are."""

    def _problems(self) -> Iterable[str]:
        return _length_problems(self)


_LONGEST, _HIGHEST = 1 << 31, 10**30


def _length_problems(lengths: Any) -> Iterable[str]:
    yield from _at_least(1, lengths, "tgt_len", "clamp_len", "attn_len")
    yield from _at_least(0, lengths, "mem_len")
    yield from _at_most(_LONGEST, lengths, "tgt_len", "mem_len", "clamp_len")
    if lengths.attn_len is not None and lengths.attn_len > lengths.mem_len + 1:
        yield (
            f"attn_len must be at most mem_len + 1 = {lengths.mem_len + 1}, got {lengths.attn_len}: the first query of "
            f"a segment sees no more. Raise mem_len to {lengths.attn_len - 1}, or lower attn_len."
        )


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(_Checked):
    """Which text, and what its tokens are."""

    name: str = ""
    """A corpus that `txl data NAME` prepared, or a text file or folder."""
    unit: Literal["byte", "char", "word", "bpe"] = "byte"
    newlines: Literal["drop", "keep", "sentence"] = "keep"
    """enwik8: the published preparation drops line ends (204 symbols); "keep" is true to the byte (205). sentence, for
    words: each line stands between two <S>, of which the first is context only (lm1b)."""
    shuffle_lines: bool = False
    """Train on the lines in a new order each epoch, drawn from train.seed (lm1b)."""
    reset_documents: bool = False
    """Files of a folder each start a segment with a fresh memory; else they are glued in order."""
    min_count: int = 1
    """Where words are counted: those rarer than this in the training part become <unk>."""
    vocab: str = ""
    """Take the symbols from this file: words one a line, a count behind each or none; for bpe a tokenizer.json."""
    bpe_size: int = 8192
    """How many symbols to make where unit is bpe."""

    def _problems(self) -> Iterable[str]:
        yield from _at_least(1, self, "min_count")
        yield from _at_least(257, self, "bpe_size")
        if self.newlines == "sentence" and self.unit != "word":
            yield f'newlines must be "keep" or "drop" for unit = "{self.unit}", got "sentence", which is for words.'
        if self.shuffle_lines and self.newlines == "drop":
            yield 'newlines must be "keep" or "sentence" where shuffle_lines is true, got "drop": no lines are left.'
        if self.shuffle_lines and self.reset_documents:
            yield "reset_documents must be false where shuffle_lines is true: a document's lines have an order."


@dataclass(frozen=True, kw_only=True)
class TrainConfig(_Checked):
    """How to train; steps are optimizer steps over batch_size x tgt_len tokens."""

    tgt_len: int = 128
    mem_len: int = 128
    clamp_len: int | None = None
    attn_len: int | None = None
    context_len: int = 0
    """Earlier tokens that each segment reads anew, with gradient and without loss, in place of a memory."""
    random_tgt_len: bool = False
    """Segments of a new length each: round tgt_len, one in twenty round half of it; the learning rate follows it."""
    batch_size: int = 32
    """Streams read side by side."""
    batch_chunk: int = 1
    """Chunks of rows whose gradients are added up before a step, to save memory."""
    loss: Literal["full", "half"] = "full"
    """half: train only on the recent half of each row's targets in a segment, as the paper's ablations do."""
    max_steps: int = 1000
    optimizer: Literal["adam", "adamw", "sgd", "muon"] = "adam"
    """muon: for the matrices of the layers; AdamW for all other weights."""
    lr: float = 2.5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    """SGD's and Muon's."""
    schedule: Literal["cosine", "inv_sqrt", "constant"] = "cosine"
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    min_lr_ratio: float = 0.0
    """Where the cosine ends, as a share of lr."""
    embedding_lr_ratio: float = 1.0
    """Factor on the learning rate of the embedding's tables; where the cosine ends, all have the same."""
    average_from: int = 0
    """Step at which the schedule ends and a running average of the weights begins, which is then what is scored and
    saved; 0: no average."""
    average_lr_ratio: float = 0.5
    """The learning rate while averaging, as a share of that at the schedule's end."""
    ar_alpha: float = 0.0
    """Activation regularisation: this times the mean square of the last layer's output is added to the loss."""
    tar_beta: float = 0.0
    """Temporal activation regularisation: the same of its change from one position to the next."""
    clip: float = 0.25
    """Largest global gradient norm; 0 switches clipping off."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ...; other kinds are refused, because none was ever tried."""
    backend: str = "auto"
    """Which implementation of the attention op; `txl env` lists them."""
    compile: bool = False
    """torch.compile the model; on a CPU this needs a C++ compiler."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What several ranks do with the weights: each has them all, or each has a part of them (FSDP2)."""
    recompute: bool = False
    """Compute each layer again in backward instead of keeping what is in it: less memory, more time."""
    seed: int = 1111
    log_every: int = 50
    eval_every: int = 1000
    """Steps between evaluations on the validation split; 0: only at the end."""
    eval_tokens: int = 0
    """Targets of the validation split to score each time; 0: all."""
    save_every: int = 1000
    keep: int = 2
    """How many of the last checkpoints stay, besides the best."""
    sample_every: int = 0
    """Steps between text samples; 0: none."""
    sample_tokens: int = 200
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where metrics go besides metrics.jsonl; each is an extra to install."""

    def _problems(self) -> Iterable[str]:
        yield from _length_problems(self)
        yield from _at_least(1, self, "batch_size", "batch_chunk", "max_steps", "log_every", "keep", "sample_tokens")
        steps = ("warmup_steps", "eval_every", "eval_tokens", "save_every", "sample_every", "average_from")
        rates = ("clip", "weight_decay", "lr", "average_lr_ratio", "ar_alpha", "tar_beta", "epsilon")
        yield from _at_least(0, self, *steps, "context_len", *rates)
        if self.average_from and self.schedule == "cosine" and not self.min_lr_ratio:
            yield "min_lr_ratio must be above 0 where average_from is given: the average would be of equal weights."
        if self.parallel == "fsdp" and (self.compile or self.average_from):
            yield "compile and average_from must be left out with parallel = fsdp, whose weights are in parts. Use ddp."
        if not self.embedding_lr_ratio > 0:
            yield f"embedding_lr_ratio must be above 0, got {self.embedding_lr_ratio}."
        if self.context_len and self.mem_len:
            yield f"mem_len must be 0 where context_len is given, which stands in its place; got {self.mem_len}."
        yield from _fractions(self, "min_lr_ratio", "momentum")
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"betas must be at least 0 and below 1, got {list(self.betas)}."
        yield from _at_most(_HIGHEST, self, *rates, "embedding_lr_ratio")
        if self.batch_chunk > 0 and self.batch_size % self.batch_chunk:
            yield f"batch_size must be a multiple of batch_chunk = {self.batch_chunk}, got {self.batch_size}."

    @property
    def lengths(self) -> Lengths:
        return Lengths(tgt_len=self.tgt_len, mem_len=self.mem_len, clamp_len=self.clamp_len, attn_len=self.attn_len)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(_Checked):
    """How a trained model is scored; a length that is None is the training one."""

    split: Literal["train", "valid", "test"] = "test"
    tgt_len: int | None = None
    mem_len: int | None = None
    clamp_len: int | None = None
    attn_len: int | None = None
    context_len: int | None = None
    """As in train, where there is no memory; with one it is 0."""
    batch_size: int = 10
    max_tokens: int = 0
    """Score the first so many tokens of the split; 0: all."""

    def _problems(self) -> Iterable[str]:
        yield from _at_least(1, self, "tgt_len", "clamp_len", "attn_len", "batch_size")
        yield from _at_least(0, self, "mem_len", "max_tokens", "context_len")
        if self.context_len and self.mem_len:
            yield f"mem_len must be 0 where context_len is given, which stands in its place; got {self.mem_len}."


@dataclass(frozen=True, kw_only=True)
class RunConfig(_Checked):
    """A whole run: what `config.toml` in a run folder holds."""

    model: TransformerXLConfig = field(default_factory=lambda: TransformerXLConfig(vocab_size=0))
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def _problems(self) -> Iterable[str]:
        if self.train.random_tgt_len and self.corpus.reset_documents:
            yield "corpus.reset_documents must be false where train.random_tgt_len is true: rows share their cuts."
        if self.model.kind not in ("vaswani", "al-rfou"):
            return
        auxiliary = self.model.intermediate_losses or self.model.multiple_targets
        if auxiliary and (self.train.ar_alpha or self.train.tar_beta):
            yield "train.ar_alpha and train.tar_beta must be 0 where the model has auxiliary losses. Leave them out."
        if self.model.kind == "al-rfou" and (self.train.ar_alpha or self.train.tar_beta):
            yield "train.ar_alpha and train.tar_beta must be 0 for kind = al-rfou, which has losses of its own."
        if self.train.random_tgt_len and self.model.positions:
            yield f"train.random_tgt_len must be false for kind = {self.model.kind}, whose places end. Leave it out."
        for section, lengths in (("train", self.train), ("eval", self.eval)):
            if lengths.clamp_len is not None:
                yield f"{section}.clamp_len is for distances, and kind = {self.model.kind} has places. Leave it out."
            width = (lengths.tgt_len or 0) + (lengths.context_len or 0)
            if self.model.positions and width > self.model.positions:
                most = f"model.positions = {self.model.positions}"
                yield f"{section}.tgt_len must be at most {most}, with context_len, got {width}. Lower it."

    @property
    def eval_lengths(self) -> Lengths:
        """The test lengths: those of `eval`, and of `train` where they are None."""
        names = ("tgt_len", "mem_len", "clamp_len", "attn_len")
        asked = {name: getattr(self.eval, name) for name in names}
        if self.eval.context_len:
            asked["mem_len"] = 0
        return Lengths(**{name: getattr(self.train, name) if asked[name] is None else asked[name] for name in names})

    def writing(self, lengths: Lengths) -> Lengths:
        """These lengths, to write text at: without a memory a segment is as long as all that is read for one."""
        return replace(lengths, tgt_len=lengths.tgt_len + self.context_len(lengths))

    def context_len(self, lengths: Lengths) -> int:
        """The tokens to read anew with each segment where lengths are these: a memory stands in their place."""
        if lengths.mem_len:
            return 0
        return self.train.context_len if self.eval.context_len is None else self.eval.context_len
