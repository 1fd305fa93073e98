"""With a trained model: `txl eval`, `txl score`, `txl generate`, `txl convert`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

RunFolder = Annotated[
    Positional[Path],
    arg(metavar="RUN", help="A run folder, one of its checkpoints, or hf:NAME for a model on the Hugging Face hub."),
]
Precision = Literal["auto", "fp32", "bf16"]
Sizes = Annotated[tuple[int, ...], arg(metavar="N ...")]
SizesOrNone = Annotated[tuple[int | None, ...], arg(metavar="N|none ...")]
"""As in a recipe's settings: none in any case."""


@dataclass(frozen=True)
class Eval:
    """Score a text by a trained model, at one or many lengths."""

    folder: RunFolder
    data: Annotated[str | None, arg(metavar="PATH")] = None
    """Score this text file, folder or archive instead: all of it, or the test split of one that names its splits."""
    split: Literal["train", "valid", "test", "all"] | None = None
    """By default the run's [eval]; train, valid or test of a text that names no splits is cut as for training; all:
    every split one after another."""
    tgt_len: Annotated[int | Literal["auto"] | None, arg(metavar="N|auto")] = None
    """Tokens a call scores; this and every other length is by default the run's. auto: the fastest, under a window."""
    mem_len: Sizes = ()
    """Tokens of memory; several are scored one after another, with every clamp_len and attn_len."""
    clamp_len: SizesOrNone = ()
    """Distances beyond this one count as this one."""
    attn_len: SizesOrNone = ()
    """How many keys a query sees, itself included."""
    same_length: bool = False
    """attn_len = mem_len, so that every query sees as much."""
    sliding: Annotated[int | None, arg(metavar="STRIDE")] = None
    """Read windows of tgt_len tokens without memory, which move on by so many; 1: each target sees just tgt_len."""
    temperature: float = 1.0
    """Divides log-probabilities, which are then made to sum to one again."""
    dynamic: Literal["sgd", "rms"] | None = None
    """Let the weights follow the text: a step on each segment after it is scored."""
    dynamic_lr: Annotated[float | None, arg(metavar="RATE")] = None
    """Its learning rate; by default 0.1. Choose it on the validation part."""
    dynamic_decay: Annotated[float | None, arg(metavar="SHARE")] = None
    """Share of the way back to the trained weights that each step goes; by default 0."""
    dynamic_epsilon: Annotated[float | None, arg(metavar="EPSILON")] = None
    """rms: keeps weights with hardly any gradient from leaping; by default 0.1."""
    dynamic_tokens: Annotated[int | None, arg(metavar="N")] = None
    """rms: measure gradients over so many tokens of the training part; by default 10,000; 0: all."""
    batch_size: Annotated[int | None, arg(metavar="N")] = None
    """Streams read side by side."""
    max_tokens: Annotated[int | None, arg(metavar="N")] = None
    """Score the first N tokens; 0: all."""
    device: str = "auto"
    precision: Precision = "auto"
    json: bool = False
    """Print one JSON object."""
    dump: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write each target's id and log-probability (nats) to a NumPy .npz file."""

    def run(self) -> int:
        from ..journeys.evaluate import evaluate

        evaluate(
            self.folder,
            data=self.data,
            scope={"split": self.split, "batch_size": self.batch_size, "max_tokens": self.max_tokens},
            tgt_len=self.tgt_len,
            mem_len=self.mem_len,
            clamp_len=self.clamp_len,
            attn_len=self.attn_len,
            same_length=self.same_length,
            sliding=self.sliding,
            temperature=self.temperature,
            dynamic={
                "rule": self.dynamic,
                **{name: getattr(self, f"dynamic_{name}") for name in ("lr", "decay", "epsilon", "tokens")},
            },
            device=self.device,
            precision=self.precision,
            as_json=self.json,
            dump=self.dump,
        )
        return 0


@dataclass(frozen=True)
class Score:
    """Log-probability (nats), perplexity and bits of each line of a file, tab-separated, a line each."""

    folder: RunFolder
    file: Annotated[Positional[str], arg(metavar="FILE|-")]
    """A text file, which may be compressed (.gz, .xz, .bz2), or - for standard input."""
    tgt_len: Annotated[int | None, arg(metavar="N")] = None
    mem_len: Annotated[int | None, arg(metavar="N")] = None
    """Tokens of memory within a line."""
    device: str = "auto"
    precision: Precision = "fp32"
    json: bool = False
    """Print a JSON object a line."""

    def run(self) -> int:
        from ..journeys.evaluate import score

        lengths = {"tgt_len": self.tgt_len, "mem_len": () if self.mem_len is None else (self.mem_len,)}
        score(self.folder, self.file, lengths, device=self.device, precision=self.precision, as_json=self.json)
        return 0


@dataclass(frozen=True)
class Generate:
    """Write text, shown as it comes."""

    folder: RunFolder
    prompt: Annotated[tuple[str, ...], arg(metavar="TEXT|-|@FILE ...")] = ()
    """What to continue; several are continued side by side. -: standard input."""
    prompt_file: Annotated[str | None, arg(metavar="FILE")] = None
    """Continue the text in this file."""
    from_test: Annotated[int | None, arg(metavar="N")] = None
    """Continue the first N tokens of the test set, up to 512."""
    max_tokens: Annotated[int, arg(metavar="N")] = 500
    top_k: Annotated[int, arg(metavar="N")] = 40
    """Draw from so many likeliest tokens only; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that hold this share of the probability."""
    temperature: float = 1.0
    """0: the likeliest token each time."""
    stop: Annotated[tuple[str, ...], arg(metavar="TEXT ...")] = ()
    """End before the first of these."""
    seed: Annotated[int | None, arg(metavar="N")] = None
    """The same seed writes the same text; by default another one each time."""
    n: int = 1
    """Continuations of each prompt."""
    mem_len: Annotated[int | None, arg(metavar="N")] = None
    """Tokens of memory, by default as in evaluation; 0: each token is written from the last tgt_len ones."""
    device: str = "auto"
    precision: Precision = "auto"
    compile: bool = False
    """On a CPU, compile the step to the next token: minutes at the first time, then faster. It needs a C++ compiler."""
    raw: bool = False
    """Show words as the corpus spells them, with punctuation apart (WikiText, Penn Treebank, lm1b)."""
    json: bool = False
    """Print a JSON object for each continuation, when all are done."""

    def run(self) -> int:
        from ..journeys.generate import generate

        names = ("temperature", "top_k", "top_p", "seed", "stop")
        generate(
            self.folder,
            [*self.prompt, *([f"@{self.prompt_file}"] if self.prompt_file else [])],
            {name: getattr(self, name) for name in names},
            self.max_tokens,
            rows=self.n,
            from_test=self.from_test,
            mem_len=self.mem_len,
            device=self.device,
            precision=self.precision,
            compiled=self.compile,
            raw=self.raw,
            as_json=self.json,
        )
        return 0


@dataclass(frozen=True)
class Convert:
    """Checkpoints of other programs in, and ours out to them. Any setting can be given as --section.field value."""

    source: Annotated[Positional[str], arg(metavar="SRC")]
    """What another program wrote, with --from; or a run, with --to-format."""
    to: Annotated[Path, arg(metavar="DIR")]
    """The new folder."""
    program: Annotated[Literal["original", "tensorflow", "huggingface", "nvidia"] | None, arg(name="from")] = None
    """The program. original: the authors' PyTorch code; tensorflow: their TensorFlow code; huggingface: TransfoXL of
    transformers, or a folder exported from here; nvidia: DeepLearningExamples."""
    to_format: Literal["huggingface", "original"] | None = None
    """huggingface: a folder for transformers >= 5; original: the authors' state dict. By default one of our own."""
    vocab: Annotated[str | None, arg(metavar="FILE|NAME")] = None
    """The symbols, where SRC holds none: cache.pt, cache.pkl, vocab.pkl, a list of words, or a prepared corpus."""

    def run(self, overrides: Sequence[str]) -> int:
        from ..journeys.convert import convert

        convert(
            self.source,
            self.to,
            program=self.program,
            to_format=self.to_format,
            vocab=self.vocab,
            overrides=overrides,
        )
        return 0
