"""`txl`: the command line.

tyro writes the help and reads everything but the settings of a recipe, `--section.field value`: those go to `recipe`,
together with the file, so that all that is wrong with both is told at once. No torch is imported before a command runs.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from transformer_xl import recipe as recipes
from transformer_xl.settings import RunConfig

MISTAKE = 2
"""Exit status for a user's mistake; 75 is a run that a signal stopped after it saved."""

RunFolder = Annotated[
    Positional[Path],
    arg(metavar="RUN", help="A run folder, one of its checkpoints, or hf:NAME for a model on the Hugging Face hub."),
]
Precision = Literal["auto", "fp32", "bf16"]
Sizes = Annotated[tuple[int, ...], arg(metavar="N ...")]
SizesOrNone = Annotated[tuple[int | None, ...], arg(metavar="N|None ...")]


@dataclass(frozen=True)
class Demo:
    """Train, score and write text in minutes: no network, no data."""

    out: Annotated[Path | None, arg(metavar="RUN")] = None
    """Keep the run in this folder; by default it goes when the demo ends."""
    minutes: float = 5.0
    """Time for everything on this machine."""

    def run(self) -> int:
        from transformer_xl.run.demo import demo

        return demo(out=self.out, minutes=self.minutes)


@dataclass(frozen=True)
class Data:
    """Prepare a published corpus: download it, or take a local copy."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """enwik8, text8, ptb, ptb-char, wikitext-2, wikitext-2-raw, wikitext-103 or lm1b."""
    source: Annotated[Path | None, arg(metavar="PATH")] = None
    """A local copy instead: the folder with its files, as published or compressed; an archive; or the one file."""
    partial: bool = False
    """Take what there is of it in --source. Train on it as NAME-partial; all figures say so."""
    vocab: Annotated[Path | None, arg(metavar="FILE")] = None
    """The words in this file, one a line, with or without counts, are the vocabulary."""
    newlines: Literal["published", "drop", "keep"] = "published"
    """enwik8: the published protocol drops line ends; "keep" is true to the byte."""

    def run(self) -> int:
        from transformer_xl.run.data import data

        newlines = None if self.newlines == "published" else self.newlines
        data(self.name, self.source, newlines=newlines, partial=self.partial, vocab_file=self.vocab)
        return 0


@dataclass(frozen=True)
class Train:
    """Train by a recipe, then score the best checkpoint. Any setting can be given as --section.field value."""

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """The name of a packaged recipe, or a TOML file."""
    data: Annotated[str | None, arg(metavar="PATH")] = None
    """Train on this text file or folder instead; line ends are kept and the vocabulary follows the text."""
    out: Annotated[Path | None, arg(metavar="RUN")] = None
    """The run folder; by default runs/ and the recipe's name."""
    init: Annotated[Path | None, arg(metavar="RUN")] = None
    """Start from the weights, shape and vocabulary of that run."""
    resume: bool = False
    """Go on with the run in --out from its last checkpoint, by its own config.toml."""
    print_config: bool = False
    """Print the settings as TOML, and stop."""
    settings: Annotated[RunConfig, arg(name="")] = field(default_factory=RunConfig)
    """Only for the help: `run` reads the words themselves."""

    def run(self, overrides: Sequence[str]) -> int:
        out = self.out or default_run(self.recipe)
        if self.resume:
            from transformer_xl.run.train import resumed

            recipes.find_recipe(self.recipe)
            config = resumed(out, overrides, self.data)
        else:
            given = recipes.data_settings(self.data) if self.data else ()
            config = recipes.load_recipe(self.recipe, overrides, defaults=given)
        if self.print_config:
            print(recipes.write_toml(config), end="")
            return 0
        from transformer_xl.run.train import train

        return train(config, out, resume=self.resume, init=self.init)


@dataclass(frozen=True)
class Eval:
    """Score a text by a trained model, at one or many lengths."""

    folder: RunFolder
    data: Annotated[str | None, arg(metavar="PATH")] = None
    """Score this text file or folder instead (a single file's test part is its last 5 %)."""
    split: Literal["train", "valid", "test"] | None = None
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
    batch_size: Annotated[int | None, arg(metavar="N")] = None
    """Streams read side by side."""
    max_tokens: Annotated[int | None, arg(metavar="N")] = None
    """Score the first so many tokens; 0: all."""
    device: str = "auto"
    precision: Precision = "auto"
    json: bool = False
    """Print one JSON object."""
    dump: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write each target's id and log-probability (nats) to a NumPy .npz file."""

    def run(self) -> int:
        from transformer_xl.run.evaluate import evaluate

        evaluate(
            self.folder,
            data=self.data,
            scope={"split": self.split, "batch_size": self.batch_size, "max_tokens": self.max_tokens},
            tgt_len=self.tgt_len,
            mem_len=self.mem_len,
            clamp_len=self.clamp_len,
            attn_len=self.attn_len,
            same_length=self.same_length,
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
    """A text file, or - for standard input."""
    tgt_len: Annotated[int | None, arg(metavar="N")] = None
    mem_len: Annotated[int | None, arg(metavar="N")] = None
    """Tokens of memory within a line."""
    device: str = "auto"
    precision: Precision = "fp32"
    json: bool = False
    """Print a JSON object a line."""

    def run(self) -> int:
        from transformer_xl.run.evaluate import score

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
    """Tokens of memory; by default as in evaluation."""
    device: str = "auto"
    precision: Precision = "auto"
    raw: bool = False
    """Show words as the corpus spells them, with punctuation apart (WikiText, Penn Treebank, lm1b)."""
    json: bool = False
    """Print a JSON object for each continuation, when all are done."""

    def run(self) -> int:
        from transformer_xl.run.generate import generate

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
        from transformer_xl.run.convert import convert

        convert(
            self.source,
            self.to,
            program=self.program,
            to_format=self.to_format,
            vocab=self.vocab,
            overrides=overrides,
        )
        return 0


@dataclass(frozen=True)
class Bench:
    """Time a part of the work beside its peers and its bound; the last line is JSON."""

    part: Annotated[
        Positional[Literal["train", "eval", "decode", "op", "sliding", "memory", "data", "all"]],
        arg(metavar="train|eval|decode|op|sliding|memory|data|all"),
    ]
    """train: optimizer steps; eval: segments; decode: a token at a time; op: attention alone; sliding: the paper's
    Table 9; memory: the most a training step holds; data: from text to ids; all: all but data."""
    size: Literal["paper", "toy"] | None = None
    """toy: the same code at sizes that take seconds. By default paper."""
    recipe: Annotated[str | None, arg(metavar="RECIPE")] = None
    """Whose model; by default enwik8-12l."""
    peers: Annotated[str | None, arg(metavar="PYTHON")] = None
    """The Python of an environment with torch, transformers 4.37.2 and, if wanted, x-transformers."""
    device: str | None = None
    precision: Literal["fp32", "bf16"] | None = None
    """Ours and the textbook's; by default both."""
    batch_size: Annotated[int | None, arg(metavar="N")] = None
    tgt_len: Annotated[int | None, arg(metavar="N")] = None
    mem_len: Annotated[int | None, arg(metavar="N")] = None
    """Tokens of memory; sliding: the attention length."""
    repeats: Annotated[int | None, arg(metavar="N")] = None
    """How many turns each contender takes; medians are shown. By default 5, for data 1."""
    megabytes: Annotated[int | None, arg(metavar="N")] = None
    """data: size of the text; by default 540, as WikiText-103 has."""
    counts: Annotated[Path | None, arg(metavar="FILE")] = None
    """data: draw words by the counts in this file; by default made-up words under Zipf's law."""

    def run(self) -> int:
        from transformer_xl.bench import bench

        bench(self.part, {name: value for name, value in vars(self).items() if name != "part"})
        return 0


@dataclass(frozen=True)
class Env:
    """What this machine has, what would run on it, and why."""

    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from transformer_xl.run.env import env

        env(as_json=self.json)
        return 0


COMMANDS = {
    command.__name__.lower(): command for command in (Demo, Data, Train, Eval, Score, Generate, Convert, Bench, Env)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; a user's mistake is told in a sentence, a bug keeps its traceback."""
    try:
        return dispatch(sys.argv[1:] if arguments is None else list(arguments))
    except BrokenPipeError:  # the reader, `head` for one, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        sentence = users_sentence(error)
        if sentence is None:
            raise
        sys.stdout.flush()
        complain(sentence.splitlines())
        return MISTAKE


def dispatch(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        from transformer_xl import __version__

        print(f"txl {__version__}")
        return 0
    overrides, others = (
        recipes.split_overrides(arguments) if arguments[:1] in (["train"], ["convert"]) else ([], arguments)
    )
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="txl",
            description=f"Transformer-XL. Recipes: {', '.join(recipes.packaged_recipes())}.",
            args=others,
            config=(FlagCreatePairsOff,),
        )
    except SystemExit as exit:
        problems: list[str] = []
        if exit.code:
            recipes.parse_overrides(overrides, problems)
        complain(problems)
        raise
    return command.run(overrides) if isinstance(command, Train | Convert) else command.run()


def default_run(recipe: str) -> Path:
    """runs/ and the recipe's name; the config.toml of a run goes by the name of that run."""
    path = Path(recipe)
    return Path("runs") / (path.resolve().parent.name if path.name == "config.toml" else path.stem)


def users_sentence(error: Exception) -> str | None:
    """What to tell the user, or None where the fault is ours.

    The package's own `raise ValueError(...)` speaks to the user, by the house's law; an error that comes up from torch,
    numpy or the interpreter is a bug. Paths that are missing, forbidden or full are the user's in any case.
    """
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}."
    if isinstance(error, ValueError | OSError | FloatingPointError) and raised_here(error):
        return str(error)
    return None


def raised_here(error: Exception) -> bool:
    """Whether a `raise` statement of this package made the error, and not something that it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    raising = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raising and package == __name__.partition(".")[0]


def complain(sentences: Sequence[str]) -> None:
    for sentence in sentences:  # which may name what stands in a file: no escape of a terminal gets through
        print("txl:", "".join(c if c.isprintable() else ascii(c)[1:-1] for c in sentence), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
