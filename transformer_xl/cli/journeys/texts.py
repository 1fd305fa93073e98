"""Read the text of a command, and print notes about it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ...config.recipe import text_name
from ...config.settings import CorpusConfig
from ...data.corpus import Corpus
from ...data.datasets import open_corpus
from ...data.header import WHOLE
from ...data.reading import read_file
from ...data.vocab import Vocab
from ...mistake import Mistake
from ...run import Run


def corpus_for(run: Path, config: CorpusConfig, vocab: Vocab, data: str | None, asked: str | None) -> Corpus:
    """Open the run's own corpus, or the text `data`, in the run's vocabulary.

    A text without splits is cut only if `asked` names a split. Notes about the text go to standard error.

    Raises:
        ValueError, OSError: there is no such text, the run's text has changed, or the vocabulary does not fit it.
    """
    if data is None and not config.name:
        raise Mistake(f"{run} does not say which text it is for: name a file, a folder or a corpus by --data.")
    whole = data is not None and asked in (None, WHOLE)
    corpus = open_corpus(config if data is None else replace(config, name=data), vocab, whole=whole)
    if data is None and (changed := Run.of(run).changed_splits(corpus)):
        raise Mistake(
            f"{config.name} has changed since {run} was trained on it: {changed} has another SHA-256, so text that "
            "trained the model may be in it. Restore it, or name what to read by --data."
        )
    notes = list(corpus.notes)
    if whole and data is not None and text_name(data) == config.name:
        notes.append(f"{data} trained this model, and is read whole: --split test is what was held out of it.")
    for note in notes:
        print(f"txl: {note}", file=sys.stderr)
    return corpus


def report_unknown(vocab: Vocab, texts: Iterable[str | bytes], name: str, consequence: str = "") -> None:
    """Print to standard error how many tokens of the texts are unknown to the model; `name` names the texts."""
    ids = [vocab.encode(text) for text in texts]
    unknown = 0 if vocab.unk is None else sum(int((each == vocab.unk).sum()) for each in ids)
    if unknown:
        counts = f"{unknown:,} of {sum(map(len, ids)):,}"
        print(f"{counts} {vocab.unit}s of {name} are unknown to the model{consequence}.", file=sys.stderr)


def read_text(file: str) -> bytes:
    """The bytes of a file, or of standard input for "-"."""
    if file == "-":
        return sys.stdin.buffer.read()
    if not Path(file).is_file():
        raise FileNotFoundError(f"There is no file {file}. Give a text file, or - for standard input.")
    return read_file(Path(file))


def writable(path: Path, option: str) -> Path:
    """Return `path`; raise `Mistake` if it cannot be a file to write. Called before any work."""
    if path.exists() and not path.is_file():
        raise Mistake(f"{option} must be a file to write, and {path} is a folder, a pipe or a device. Name another.")
    return path


def text_of(text: bytes, file: str) -> str:
    """Decode UTF-8; raise `Mistake` for other bytes, because only a model of bytes can read them."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise Mistake(f"{file} is not UTF-8 text ({error}), and the model reads text, not bytes.") from error
