"""Everything a recipe can set, as plain dataclasses. Nothing here imports torch, so `txl --help` starts at once.

`TransformerXLConfig` sets the model and `Lengths` the lengths of one call. The other sections set the
text, the training and the scoring. A recipe is a TOML file with one table per section of `RunConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from .problems import Checked, Problem, WrongSettings, out_of_bounds
from .shape import ATTENTION, KINDS, TransformerXLConfig, needs, of_other_kinds

_LONGEST, _HIGHEST = 1 << 31, 1e30
MOST_STREAMS = 1 << 20
Unit = Literal["byte", "char", "word", "bpe", "id"]
Newlines = Literal["drop", "keep", "sentence"]
Part = Literal["train", "valid", "test", "all"]
"""What a command reads of a corpus."""
Precision = Literal["auto", "fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Lengths(Checked):
    """Lengths of one forward pass, in tokens. They never change the shape of the weights."""

    tgt_len: int
    """Tokens per segment."""
    mem_len: int
    """Tokens of memory before each segment; 0 switches recurrence off."""
    clamp_len: int | None = None
    """Largest distance; greater ones are encoded as this one."""
    attn_len: int | None = None
    """Number of keys that a query attends to, including its own; None: all."""

    def _problems(self) -> Iterator[Problem]:
        return _length_problems(self)


LENGTHS = tuple(each.name for each in fields(Lengths))


def _length_problems(lengths: Any) -> Iterator[Problem]:
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


def _context_problems(lengths: Any) -> Iterator[Problem]:
    yield from out_of_bounds(lengths, "context_len", least=0)
    if lengths.context_len and lengths.mem_len:
        sentence = f"{{}} must be 0 where {{}} is given, which replaces the memory, got {lengths.mem_len}."
        yield Problem(("mem_len", "context_len"), sentence)


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(Checked):
    """The text and its tokens."""

    name: str = ""
    """A corpus that `txl data NAME` prepared, or a text file or folder."""
    unit: Unit = "byte"
    """id: the text is files of token ids, which another program made (.npy, .npz, .bin, .json, .jsonl)."""
    newlines: Newlines = "keep"
    """drop: remove line ends, as in the published enwik8 (204 byte values; "keep" has 205). sentence (unit word): put
    each line between two <S>; the first is not scored (lm1b)."""
    shuffle_lines: bool = False
    """Shuffle the lines of the training split in each epoch, with train.seed (lm1b)."""
    reset_documents: bool = False
    """Start each file of a folder with an empty memory, as each JSON line always does. By default the files are joined
    in the order of their names."""
    document_end: str = ""
    """The token that ends a document in one stream, for example <|endoftext|>, or an id: from it on the model sees
    nothing before it. Where documents are apart (JSON lines, tables, files with reset_documents), it is added after
    each, and they are joined."""
    min_count: int = 1
    """Words that occur fewer times than this in the training split become <unk>, if the vocabulary is made from it."""
    vocab: str = ""
    """A file with the vocabulary: one word per line, with or without a count after it; for bpe a tokenizer.json."""
    extend_vocab: bool = False
    """With --init: add the words and characters of the training split that the model does not know, from min_count
    occurrences on, or the ids up to the largest. Known ones keep their ids; a new row begins as that of <unk>, or the
    mean, and a little noise."""
    bpe_size: int = 8192
    """For unit bpe: size of the vocabulary to make."""
    column: str = ""
    """The column of a table (.parquet, .arrow, .csv, .tsv), or the field of JSON lines, that holds the text. By default
    "text", or the only column of texts; .csv and .tsv are tables only if this is set."""

    def _problems(self) -> Iterator[Problem]:
        yield from out_of_bounds(self, "min_count", least=1)
        yield from out_of_bounds(self, "bpe_size", least=257, most=1 << 24)
        if self.unit == "bpe" and len(self.document_end) > 1 and len(self.document_end.split()) != 1:
            sentence = '{} must have no white space for {} = "bpe", which cuts texts there.'
            yield Problem(("document_end", "unit"), sentence)
        if any("\ud800" <= character <= "\udfff" for character in self.document_end):
            yield Problem(("document_end",), "{} must be UTF-8, because config.toml holds it. Name another token.")
        if self.extend_vocab and self.unit == "bpe":
            sentence = '{} must be false for {} = "bpe", because subwords write any word. Leave it out.'
            yield Problem(("extend_vocab", "unit"), sentence)
        if self.newlines == "sentence" and self.unit not in ("word", "id"):
            sentence = f'{{}} must be "keep" or "drop" for {{}} = "{self.unit}", got "sentence", which is for words.'
            yield Problem(("newlines", "unit"), sentence)
        for name, default in (("newlines", "keep"), ("vocab", ""), ("column", "")) if self.unit == "id" else ():
            if getattr(self, name) != default:
                yield Problem((name, "unit"), '{} must be left out for {} = "id", because ids have no text.')
        if self.shuffle_lines and self.newlines == "drop" and self.unit != "id":
            sentence = '{} must be "keep" or "sentence" where {} is true, got "drop", which leaves no lines.'
            yield Problem(("newlines", "shuffle_lines"), sentence)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
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
    short_share: float = 0.0
    """In this first share of the steps tgt_len and mem_len are half as long, and the batch has twice as many rows. The
    memory is emptied after it."""
    passes: int = 1
    """Number of copies of the text that are read as one epoch, each from a random token on and around its end (10 in
    the authors' TensorFlow code for TPUs)."""
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
    """How the learning rate falls after warm-up: to min_lr_ratio along a half cosine or a line, with 1 / sqrt(step), or
    not at all."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    min_lr_ratio: float = 0.0
    """The final learning rate of the cosine and linear schedules, as a share of lr."""
    embedding_lr_ratio: float = 1.0
    """Factor on the learning rate of the embedding tables. It does not apply to the final rate of the cosine and linear
    schedules."""
    ngram_lr_ratio: float = 10.0
    """The same factor for the table of n-grams and matches, whose Adagrad needs ten times the rate of Adam or Muon."""
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
    precision: Precision = "auto"
    """Precision of matrix products. fp16, for GPUs without bf16, scales the loss and skips steps that overflow."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..., or mps, Apple's GPU, on which nothing was run yet."""
    backend: str = "auto"
    """Implementation of the attention op; `txl env` lists them."""
    compile: bool = False
    """Compile the model with torch.compile, for full segments and memories, or with random_tgt_len for all; on a CPU
    this needs a C++ compiler."""
    cuda_graph: bool = False
    """Record a step's kernels once, on one GPU, and start them together from then on: the same numbers."""
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
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers that receive the metrics in addition to metrics.jsonl; each needs an extra package."""

    def _problems(self) -> Iterator[Problem]:
        yield from _length_problems(self)
        yield from out_of_bounds(self, "batch_size", least=1, most=MOST_STREAMS)
        counts = ("batch_chunk", "passes", "max_steps", "log_every", "keep", "sample_tokens")
        steps = ("warmup_steps", "eval_every", "eval_tokens", "save_every", "sample_every", "average_from")
        rates = ("clip", "weight_decay", "lr", "average_lr_ratio", "ar_alpha", "tar_beta", "epsilon")
        yield from out_of_bounds(self, *counts, least=1)
        yield from out_of_bounds(self, *steps, *rates, least=0)
        yield from out_of_bounds(self, "embedding_lr_ratio", "ngram_lr_ratio", above=0)
        yield from out_of_bounds(self, "min_lr_ratio", "momentum", "betas", "short_share", least=0, below=1)
        yield from out_of_bounds(self, *rates, "embedding_lr_ratio", "ngram_lr_ratio", most=_HIGHEST)
        yield from _context_problems(self)
        for name in ("tgt_len", "mem_len") if self.short_share else ():
            if getattr(self, name) % 2:
                sentence = f"{{}} must be even where {{}} is given, which halves it, got {getattr(self, name)}."
                yield Problem((name, "short_share"), sentence)
        for name in ("attn_len", "random_tgt_len", "context_len") if self.short_share else ():
            if getattr(self, name):
                sentence = "{} sets the lengths itself, so it must be 0 where {} is given. Leave one of them out."
                yield Problem(("short_share", name), sentence)
        if self.average_from and self.schedule in ("cosine", "linear") and not self.min_lr_ratio:
            sentence = "{} must be above 0 where {} is given, because weights that no longer change need no average."
            yield Problem(("min_lr_ratio", "average_from", "schedule"), sentence)
        if self.parallel == "fsdp" and (self.compile or self.average_from):
            sentence = "{} and {} must be left out with {} = fsdp, which splits the weights. Use ddp."
            yield Problem(("compile", "average_from", "parallel"), sentence)
        for name, usual in {"random_tgt_len": False, "batch_chunk": 1, "recompute": False}.items():
            if self.cuda_graph and getattr(self, name) != usual:
                yield Problem(("cuda_graph", name), "{} cannot be given with {}. Leave one of them out.")
        if self.batch_chunk > 0 and self.batch_size % self.batch_chunk:
            sentence = f"{{}} must be a multiple of {{}} = {self.batch_chunk}, got {self.batch_size}."
            yield Problem(("batch_size", "batch_chunk"), sentence)

    @property
    def lengths(self) -> Lengths:
        return Lengths(tgt_len=self.tgt_len, mem_len=self.mem_len, clamp_len=self.clamp_len, attn_len=self.attn_len)

    def at(self, step: int) -> TrainConfig:
        """The settings of this step; see `short_share` (Press et al. 2021, arXiv 2012.15832)."""
        if step >= round(self.short_share * self.max_steps):
            return self
        short = {"tgt_len": self.tgt_len // 2, "mem_len": self.mem_len // 2, "batch_size": 2 * self.batch_size}
        return replace(self, **short, short_share=0)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Checked):
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
    """Score at most this many targets of the split; 0: all."""

    def _problems(self) -> Iterator[Problem]:
        yield from _length_problems(self)
        yield from _context_problems(self)
        yield from out_of_bounds(self, "batch_size", least=1, most=MOST_STREAMS)
        yield from out_of_bounds(self, "max_tokens", least=0)


_OTHERS = tuple(kind for kind in KINDS if kind != "al-rfou")
_OF_KINDS = {"ar_alpha": _OTHERS, "tar_beta": _OTHERS, "random_tgt_len": _OTHERS}
"""Settings of [train] that only some kinds of models have."""
LENGTHS_OF_KINDS: dict[str, tuple[str, ...]] = {"clamp_len": ("transformer-xl", "shaw"), "attn_len": ATTENTION}
"""Lengths that only some kinds of models have."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Checked):
    """All settings of a run; its folder has them in `config.toml`."""

    model: TransformerXLConfig = field(default_factory=lambda: TransformerXLConfig(vocab_size=0))
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def _problems(self) -> Iterator[Problem]:
        if self.train.passes > 1 and self.corpus.shuffle_lines:
            yield Problem(
                ("train.passes", "corpus.shuffle_lines"), "{} must be 1 where {} is true. Leave one of them out."
            )
        if self.corpus.document_end:
            yield from self.model.problems_of_ends("corpus.document_end", "model.zero_memory", "model.kind")
        yield from self._problems_of_ngrams()
        yield from of_other_kinds(self.train, _OF_KINDS, self.model, "train.{}")
        for section, lengths in (("train", self.train), ("eval", self.eval)):
            yield from of_other_kinds(lengths, LENGTHS_OF_KINDS, self.model, section + ".{}")
            again = self.train.context_len if lengths is self.train else self.context_len(self.eval)
            width = (lengths.tgt_len or self.train.tgt_len) + again
            if self.model.base_kind == "al-rfou" and width > self.model.positions:
                sentence = f"{{}} must be at most {{}} = {self.model.positions}, {{}} included, got {width}. Lower it."
                yield Problem((f"{section}.tgt_len", "model.positions", f"{section}.context_len"), sentence)
        try:
            _ = self.eval_lengths
        except WrongSettings as error:
            yield from error.inside("eval")

    def _problems_of_ngrams(self) -> Iterator[Problem]:
        for name in ("ngrams", "matches") if self.train.parallel == "fsdp" else ():
            if getattr(self.model, name):
                sentence = "{} must be left out with {} = fsdp, which cannot split gradients of a few rows. Use ddp."
                yield Problem((f"model.{name}", "train.parallel"), sentence)
        if self.train.ngram_lr_ratio != TrainConfig.ngram_lr_ratio and not self.model.ngram_sizes:
            parts = ("model.ngrams", "model.matches")
            yield Problem(("train.ngram_lr_ratio", *parts), needs(*parts))

    @property
    def eval_lengths(self) -> Lengths:
        """The lengths of `eval`; where one is None, the length of `train`."""
        asked = {name: getattr(self.eval, name) for name in LENGTHS}
        if self.eval.context_len:
            asked["mem_len"] = 0
        return Lengths(**{name: getattr(self.train, name) if asked[name] is None else asked[name] for name in LENGTHS})

    def writing_lengths(self, lengths: Lengths) -> Lengths:
        """The lengths for generating text. Without a memory, a segment includes the context that is read again."""
        return replace(lengths, tgt_len=lengths.tgt_len + self.context_len(lengths))

    def context_len(self, lengths: Lengths | EvalConfig) -> int:
        """Number of tokens to read again with each segment at these lengths; 0 if there is a memory."""
        if lengths.mem_len:
            return 0
        return self.train.context_len if self.eval.context_len is None else self.eval.context_len
