"""Commands that use a trained model: eval, score, harness, generate, serve and convert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from .command import Command, Folder, Part, Precision, RunFolder, Size, Sizes, SizesOrNone, Text


@dataclass(frozen=True)
class Eval(Command):
    """Score a text with a trained model, at one or many lengths."""

    folder: RunFolder
    data: Text = None
    """Score this text file, folder or archive instead: its test split, or all of it if it has no splits."""
    split: Part | None = None
    """The split to score; by default the one in the run's [eval]. A text without splits is cut into train, valid and
    test as for training. all: every split, one after another."""
    tgt_len: Size = None
    """Tokens per forward pass. All lengths default to the run's."""
    mem_len: Sizes = ()
    """Tokens of memory. Several values are scored one after another, with every clamp_len and attn_len."""
    clamp_len: SizesOrNone = ()
    """Largest distance; greater ones are encoded as this one."""
    attn_len: SizesOrNone = ()
    """Number of keys that a query attends to, including its own."""
    same_length: bool = False
    """Set attn_len to mem_len, so every query attends to the same number of keys."""
    sliding: Annotated[int | None, arg(metavar="STRIDE")] = None
    """Read windows of tgt_len tokens without memory; each starts STRIDE tokens after the last. 1: every target has
    tgt_len tokens of context."""
    temperature: float = 1.0
    """Divide log-probabilities by this and normalise them again."""
    dynamic: Literal["sgd", "rms"] | None = None
    """Dynamic evaluation: take a gradient step on each segment after scoring it."""
    dynamic_lr: Annotated[float | None, arg(metavar="RATE")] = None
    """Learning rate of --dynamic; by default 0.1. Choose it on the validation split."""
    dynamic_decay: Annotated[float | None, arg(metavar="SHARE")] = None
    """Each step also moves the weights back towards the trained ones, by this share of the difference; by default 0."""
    dynamic_epsilon: Annotated[float | None, arg(metavar="EPSILON")] = None
    """rms: limits the steps of weights with small gradients; by default 0.1."""
    dynamic_tokens: Size = None
    """rms: measure gradients on this many tokens of the training split; by default 10,000; 0: all."""
    batch_size: Size = None
    """Number of streams (rows of a batch); by default the run's, or 1 with --sliding or --dynamic."""
    max_tokens: Size = None
    """Score at most N tokens; 0: all."""
    device: str = "auto"
    precision: Precision = "auto"
    json: bool = False
    """Print one JSON object."""
    dump: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write each target's id and log-probability (nats) to a NumPy .npz file."""

    journey = "evaluate.evaluate"


@dataclass(frozen=True)
class Score(Command):
    """Print the log-probability (nats), perplexity and bits of each line of a file, separated by tabs."""

    folder: RunFolder
    file: Annotated[Positional[str], arg(metavar="FILE|-")]
    """A text file, which may be compressed (.gz, .xz, .bz2), or - for standard input."""
    tgt_len: Size = None
    mem_len: Size = None
    """Tokens of memory within a line."""
    device: str = "auto"
    precision: Precision = "fp32"
    json: bool = False
    """Print one JSON object per line."""

    journey = "evaluate.score"


@dataclass(frozen=True)
class Harness(Command):
    """Score a model on tasks of lm-evaluation-harness.

    txl_ptb and txl_wikitext2 are made from corpora that `txl data` prepared; they need no network."""

    folder: RunFolder
    tasks: Annotated[tuple[str, ...], arg(metavar="NAME,...")] = ()
    """Names of tasks or groups of tasks."""
    include: Folder = None
    """A folder with more tasks, as YAML files."""
    limit: Size = None
    """Use only the first N documents of each task."""
    num_fewshot: Size = None
    """Number of solved examples before each question; by default the task's."""
    tgt_len: Size = None
    """Tokens per forward pass. All lengths default to the run's."""
    mem_len: Size = None
    """Tokens of memory within a document. It is empty at the start of each document."""
    batch_tokens: Annotated[int, arg(metavar="N")] = 8192
    """Number of positions in a forward pass, over all rows."""
    device: str = "auto"
    precision: Precision = "fp32"
    output: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write everything that the harness reports to a JSON file."""
    json: bool = False
    """Print one JSON object."""

    journey = "harness.harness"


@dataclass(frozen=True)
class Generate(Command):
    """Generate text and print it token by token."""

    folder: RunFolder
    prompt: Annotated[tuple[str, ...], arg(metavar="TEXT|-|@FILE ...")] = ()
    """Text to continue; several prompts are continued in one batch. -: standard input. @FILE: the text of a file."""
    from_test: Size = None
    """Continue the first N tokens of the test split, at most 512."""
    max_tokens: Annotated[int, arg(metavar="N")] = 500
    top_k: Annotated[int, arg(metavar="N")] = 40
    """Sample only from the N likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest likeliest tokens whose probabilities sum to at least this."""
    temperature: float = 1.0
    """Divide log-probabilities by this. 0: take the likeliest token each time."""
    stop: Annotated[tuple[str, ...], arg(metavar="TEXT ...")] = ()
    """End the text before the first of these strings."""
    seed: Size = None
    """The same seed gives the same text. By default every call uses a new one."""
    n: int = 1
    """Number of continuations of each prompt."""
    mem_len: Size = None
    """Tokens of memory; by default as in evaluation. 0: generate each token from the last tgt_len tokens."""
    device: str = "auto"
    precision: Precision = "auto"
    compile: bool = False
    """Compile the computation of a token, which takes minutes. On a CPU with AVX-512 it is faster without this."""
    raw: bool = False
    """Print words as in the corpus, with spaces around punctuation (WikiText, Penn Treebank, lm1b)."""
    json: bool = False
    """Print one JSON object per continuation, after all of them are done."""

    journey = "generate.generate"


@dataclass(frozen=True)
class Serve(Command):
    """Answer requests over HTTP in the form of OpenAI's completions, and show a page to read and write texts."""

    folder: RunFolder
    port: int = 8000
    """0: any free port, which is printed."""
    host: str = "127.0.0.1"
    """The address to listen at. Any other lets other machines in: give a token."""
    token: Annotated[tuple[str, ...], arg(metavar="TEXT ...")] = ()
    """Answer only requests with one of these tokens. By default those in the variable TXL_SERVE_TOKEN, if it is set."""
    rows: int = 16
    """Number of texts that are written at the same time, rounded up to a multiple of 8."""
    queue: int = 256
    """Number of prompts that may wait; more are answered 429."""
    max_prompt: Annotated[int, arg(metavar="N")] = 131_072
    """Tokens of a prompt, at most."""
    max_tokens: Annotated[int, arg(metavar="N")] = 16_384
    """Tokens of an answer, at most."""
    session_minutes: float = 60.0
    """How long a text can be continued after its last use."""
    sessions: Annotated[int, arg(metavar="N")] = 1000
    """Number of texts that can be continued, at most; the least recently used go first."""
    session_mb: int = 1024
    """Their memory in megabytes, at most."""
    grace: float = 30.0
    """Seconds for running texts after a signal to end."""
    mem_len: Size = None
    """Tokens of memory; by default as in evaluation."""
    device: str = "auto"
    precision: Precision = "auto"

    journey = "serve.serve"


@dataclass(frozen=True)
class Convert:
    """Import and export checkpoints of other programs.

    Any setting that `txl train --help` lists can be given as --section.field value."""

    source: Annotated[Positional[str], arg(metavar="SRC")]
    """With --from, a checkpoint of another program; with --to-format, a run."""
    to: Annotated[Path, arg(metavar="DIR")]
    """The new folder."""
    program: Annotated[Literal["original", "tensorflow", "huggingface", "nvidia"] | None, arg(name="from")] = None
    """The program that wrote SRC. original: the authors' PyTorch code; tensorflow: their TensorFlow code; huggingface:
    TransfoXL of transformers, or a folder exported by this program; nvidia: DeepLearningExamples."""
    to_format: Literal["huggingface", "original"] | None = None
    """huggingface: a folder for transformers >= 5; original: the authors' state dict. By default our own."""
    vocab: Annotated[str | None, arg(metavar="FILE|NAME")] = None
    """The vocabulary if SRC has none: cache.pt, cache.pkl, vocab.pkl, a list of words, or a prepared corpus."""

    def run(self, overrides: Sequence[str]) -> int:
        from ..journeys.convert import convert

        convert(self, overrides)
        return 0
