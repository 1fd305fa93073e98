"""The symbols of other programs' models: pickled vocabularies, read as inert data, and plain lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformer_xl.data.reading import read_file
from transformer_xl.data.vocab import EOS, LINE_ENDS, Newlines, Vocab

from .unpickle import StandIn, read_pickle

_DEPTH = 3
"""How deep in a pickled object a vocabulary may lie: a checkpoint holds a corpus, which holds it."""


def read_vocabulary(path: Path) -> tuple[Vocab, list[str]]:
    """The vocabulary in a file, and what there is to know about it: `cache.pt`, `cache.pkl`, `vocab.pkl`, `vocab.bin`,
    a checkpoint, or a text file with a word a line.

    Raises:
        ValueError: the file holds none, or is not what its name says.
    """
    if path.suffix in (".txt", ".vocab"):
        words = Vocab.read(read_file(path), str(path), newlines="drop")
        return Vocab("word", words.symbols, _newlines(words.symbols)), []
    found = pickled_vocabulary(read_pickle(path))
    if found is None:
        raise ValueError(f"{path} must hold a vocabulary, and has no idx2sym. Give cache.pt, cache.pkl or vocab.pkl.")
    return found


def pickled_vocabulary(content: Any) -> tuple[Vocab, list[str]] | None:
    """The vocabulary anywhere in what `read_pickle` found, and what there is to know about it; None where none is."""
    for attributes in _records(content, _DEPTH):
        symbols = attributes.get("idx2sym")
        if isinstance(symbols, list) and symbols and all(isinstance(symbol, str) for symbol in symbols):
            notes = []
            if attributes.get("lower_case"):
                notes.append("Its program lowers text before it looks words up: lower yours before scoring it.")
            return _vocab(symbols), notes
    return None


def _records(content: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """The attributes of an object or entries of a dict, and those of the ones in it."""
    record = content.attributes if isinstance(content, StandIn) else content
    if not isinstance(record, Mapping):
        return
    yield record
    if depth:
        for name in ("vocab", "corpus", "tokenizer"):
            if name in record:
                yield from _records(record[name], depth - 1)


def _vocab(symbols: list[str]) -> Vocab:
    """Bytes written as decimals (enwik8), characters with _ for the space (text8), else words."""
    if len(set(symbols)) != len(symbols):
        raise ValueError("The vocabulary must list each symbol once, and lists some twice. Give another by --vocab.")
    if all(symbol.isascii() and symbol.isdecimal() and int(symbol) < 256 for symbol in symbols):
        values = tuple(map(int, symbols))
        return Vocab("byte", values, "keep" if 0x0A in values else "drop")
    if all(len(symbol) == 1 for symbol in symbols):
        spaced = " " in symbols or "_" not in symbols
        characters = symbols if spaced else [" " if symbol == "_" else symbol for symbol in symbols]
        return Vocab("char", tuple(characters), "keep" if "\n" in symbols else "drop")
    return Vocab("word", tuple(symbols), _newlines(symbols))


def _newlines(symbols: Any) -> Newlines:
    known = set(symbols)
    return "keep" if EOS in known else "sentence" if LINE_ENDS["sentence"] in known else "drop"
