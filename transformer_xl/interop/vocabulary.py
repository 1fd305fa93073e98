"""Read the vocabularies of other programs: pickled ones, as inert data, and plain lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..data.reading import read_file
from ..data.vocab import EOS, LINE_ENDS, Vocab, is_text, listed_words
from ..mistake import Mistake
from ..runtime.files import read_table
from .pickles import StandIn, read_pickle

_PICKLED = (".pt", ".pth", ".pkl", ".bin")
_SPACE = frozenset(" \t\n\r")
_DECIMALS = frozenset(map(str, range(256)))


def read_vocabulary(path: Path) -> Vocab:
    """Read the vocabulary in a file.

    Args:
        path: `cache.pt`, `cache.pkl`, `vocab.pkl`, `vocab.bin` or a checkpoint; or a `.json` that this package wrote.
            Any other file is read as text with a token per line, as the authors write it.

    Raises:
        ValueError: the file has no vocabulary, or is not of the kind that its name says.
    """
    if path.suffix == ".json":
        try:
            return Vocab.from_json(read_table(path, "Get it again."))
        except ValueError as error:
            raise Mistake(f"{path} is no vocabulary: {error}") from error
    if path.suffix in _PICKLED:
        found = pickled_vocabulary(read_pickle(path), str(path))
        if found is None:
            raise Mistake(f"{path} must hold a vocabulary, and has no idx2sym. Give cache.pt, cache.pkl or vocab.pkl.")
        return found
    return _vocab(listed_words(read_file(path), str(path)), str(path))


def pickled_vocabulary(content: object, file: str) -> Vocab | None:
    """The vocabulary in `content`, which `read_pickle` returned for `file`; None if there is none.

    A checkpoint may have a corpus or a tokenizer, which has the vocabulary.
    """
    record = content.attributes if isinstance(content, StandIn) else content
    if not isinstance(record, Mapping):
        return None
    symbols = record.get("idx2sym")
    if isinstance(symbols, list) and symbols and all(isinstance(symbol, str) for symbol in symbols):
        return _vocab(symbols, file)
    inside = (pickled_vocabulary(record.get(name), file) for name in ("vocab", "corpus", "tokenizer"))
    return next(filter(None, inside), None)


def _vocab(symbols: Sequence[str], file: str) -> Vocab:
    """A vocabulary: bytes if all are decimals (enwik8), characters with _ for space (text8), otherwise words."""
    if len(set(symbols)) != len(symbols) or not all(map(is_text, symbols)):
        raise Mistake(f"{file} must list each token once, and none that is no text. Give another by --vocab.")
    if all(symbol in _DECIMALS for symbol in symbols):
        values = tuple(map(int, symbols))
        return Vocab("byte", values, "keep" if 0x0A in values else "drop")
    if all(len(symbol) == 1 for symbol in symbols):
        spaced = " " in symbols or "_" not in symbols
        characters = symbols if spaced else [" " if symbol == "_" else symbol for symbol in symbols]
        return Vocab("char", tuple(characters), "keep" if "\n" in symbols else "drop")
    if odd := next((symbol for symbol in symbols if _SPACE & set(symbol)), None):
        raise Mistake(f"{file} must list words without white space in them, and has {odd[:60]!a}.")
    newlines = "keep" if EOS in symbols else "sentence" if LINE_ENDS["sentence"] in symbols else "drop"
    return Vocab("word", tuple(symbols), newlines)
