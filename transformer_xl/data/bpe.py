"""Byte-level byte-pair encoding: convert any text to ids of subwords, and back to the same bytes.

A tokenizer is JSON of the `tokenizers` library, made by `train_bpe` or of the same kind as GPT-2's. `BytePairs` accepts
only tokenizers that restore every text exactly and whose ids do not change if the text is cut at a border: between
words, after a printable ASCII character and before a space and a letter. Text without borders is cut every 16 KB,
between characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32

from ..mistake import Mistake, shortened

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BORDER = re.compile(r"(?<=[!-~])(?= [A-Za-z])")
_BYTES_BORDER = re.compile(BORDER.pattern.encode())
_SLICE, _BATCH, _WORD = 1 << 14, 64, 1 << 10
"""Bytes that are encoded together, and without a border at most before a text is cut all the same: the library takes
130 bytes of memory for each byte of text without one, such as Chinese or DNA."""
_LARGEST_ID = 1 << 24
"""Limit on ids. The library allocates memory for all ids up to the largest, and aborts if that fails."""
_PROBE = " It's  1\n\n two\t 3\r\n , \u00e9te\u0301 \u4e2d\u6587 \U0001f600\u200d\x00\u00a0 I'LL <a b> c1 d, e's f  \n"
_KEEPING = ("Split", "Punctuation", "Digits", "ByteLevel")
"""Pre-tokenizers that keep every character unless their behavior is "Removed"."""


def _byte_characters() -> dict[str, int]:
    """GPT-2's mapping from characters to bytes. Printable bytes map to themselves, the others follow U+0100 in turn."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(shown))
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_CHARACTERS = _byte_characters()


def train_bpe(texts: Iterable[str], size: int, whole: Sequence[str] = ()) -> str:
    """Train a tokenizer of at most `size` tokens on `texts`, and return its JSON. Tokens are 256 bytes, then pairs.

    Each text in `whole` is one token, which never becomes part of a pair. A newline is always a separate token. The
    same texts give the same JSON.
    """
    tokenizers = _library()
    if not 256 <= size <= _LARGEST_ID:
        raise Mistake(
            f"The size of a byte-level vocabulary must be ≥ 256, one for each byte, and ≤ {_LARGEST_ID:,}, got {size}."
        )
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    lines = tokenizers.pre_tokenizers.Split("\n", "isolated")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([lines, byte_level(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=byte_level.alphabet(), special_tokens=list(whole), show_progress=False
    )
    with _library_errors():
        tokenizer.train_from_iterator(
            (part for text in texts for piece in slices(text.encode()) for part in _parts(piece)), trainer
        )
    return tokenizer.to_str()


class BytePairs:
    """Encodes text with a tokenizer that is given as JSON."""

    symbols: tuple[str, ...]
    """The tokens by id, as the tokenizer writes them."""
    token_bytes: tuple[bytes, ...]
    """The exact bytes of each token, by id. The joined bytes of a text's ids are the text."""
    unk: int | None = None
    lost: Sequence[str] = ()
    """What a text loses: nothing."""

    def __init__(self, content: str):
        """Load the tokenizer.

        Raises:
            ValueError: it does not restore every text exactly; the error lists every reason.
        """
        self._tokenizer = load_tokenizer(content)
        settings, ids = json.loads(self._tokenizer.to_str()), self._tokenizer.get_vocab()
        added = {token["content"] for token in settings["added_tokens"]}
        problems = _problems(settings, ids, added)
        self.symbols = tuple(sorted(ids, key=ids.__getitem__))
        self.token_bytes = tuple(
            symbol.encode() if symbol in added else bytes_of(symbol) or b"" for symbol in self.symbols
        )
        if problems or (problems := self._probe()):
            raise Mistake(
                f"The tokenizer must be byte-level BPE that gives back every text exactly, but {'; '.join(problems)}. "
                "Name another tokenizer, or train one."
            )

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Ids of `text`, which must have no lone surrogates."""
        return np.concatenate([np.empty(0, np.int32), *encoded(self._tokenizer, slices(text.encode()))])

    def _probe(self) -> list[str]:
        """Problems found by encoding a text with every kind of character."""
        with _library_errors():
            parts = self._tokenizer.pre_tokenizer.pre_tokenize_str(_PROBE)
        if not {match.start() for match in BORDER.finditer(_PROBE)} <= {start for _, (start, _) in parts}:
            return ["its pre-tokenizer does not separate words before a space"]
        changed = b"".join(self.token_bytes[i] for i in self.encode(_PROBE)) != _PROBE.encode()
        return ["it changes a text"] if changed else []


def renumber(content: str, order: Sequence[int]) -> str:
    """The same tokenizer, in which the token with id `order[i]` gets id i."""
    tokenizer = load_tokenizer(content)
    settings, ids = json.loads(tokenizer.to_str()), tokenizer.get_vocab()
    assert sorted(order) == sorted(ids.values()), "order must name every id once"
    new_ids = {old: new for new, old in enumerate(order)}
    # List added tokens among the others too; otherwise the library would number them last.
    symbols = sorted(ids, key=lambda symbol: new_ids[ids[symbol]])
    settings["model"]["vocab"] = {symbol: i for i, symbol in enumerate(symbols)}
    for token in settings["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    settings["added_tokens"].sort(key=lambda token: token["id"])
    return json.dumps(settings, ensure_ascii=False, separators=(",", ":"))


def last_cut(text: bytes | bytearray) -> int:
    """The last position at which `text`, which begins where it may be cut and may continue, can be cut; 0 if there is
    none: a border, or, 16 KB after the last of them, the next character."""
    cut = _last_border(text, 0, len(text) - 2)
    while (after := _forced(text, cut)) < len(text):
        cut = after
    return cut


def _last_border(text: bytes | bytearray, start: int, end: int) -> int:
    """The last border after `start` and not after `end`; `start` if there is none."""
    for first in (max(start + 1, end - 1000), start + 1):
        found = [each.start() for each in _BYTES_BORDER.finditer(text, first, end + 2)]
        if found:
            return found[-1]
    return start


def _forced(text: bytes | bytearray, cut: int) -> int:
    """Where to cut `text` after `cut` if no border follows."""
    position = cut + _SLICE
    while position < len(text) and text[position] & 0xC0 == 0x80:
        position += 1
    return min(position, len(text))


def encoded(tokenizer: Tokenizer, parts: Iterator[str]) -> Iterator[Int32[np.ndarray, " _"]]:
    """The ids of each part of a text."""
    while batch := list(islice(parts, _BATCH)):
        with _library_errors():
            encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        yield from (np.array(encoding.ids, np.int32) for encoding in encodings)


def slices(text: bytes) -> Iterator[str]:
    """A text cut where it may be cut, into parts of at most about 16 KB."""
    start = 0
    while start < len(text):
        end = _forced(text, start)
        if end < len(text) and (last := _last_border(text, start, start + _SLICE)) > start:
            end = last
        yield text[start:end].decode()
        start = end


def _parts(text: str) -> Iterator[str]:
    """Cut a long slice that is one word into short parts: counting pairs takes time quadratic in the word."""
    size = len(text) if len(text.encode()) < _SLICE or BORDER.search(text) else _WORD
    yield from (text[start : start + size] for start in range(0, len(text), size))


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise Mistake(
            "Subwords must have the tokenizers library, which is not installed. "
            "Run `pip install tokenizers`, or choose another unit."
        ) from error
    return tokenizers


def load_tokenizer(content: str) -> Tokenizer:
    library = _library()
    with _library_errors():
        json.loads(content, parse_int=_checked_number)
        return library.Tokenizer.from_str(content)


@contextmanager
def _library_errors() -> Iterator[None]:
    """Turn an error of the library into a sentence."""
    try:
        yield
    except BaseException as error:  # the library raises no narrower class, and its panics are not Exceptions
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        reason = shortened(str(error)).rstrip(".")
        raise Mistake(f"The tokenizer must be a tokenizer.json of the tokenizers library: {reason}.") from error


def _checked_number(number: str) -> int:
    if len(number) > 8 or int(number) > _LARGEST_ID:
        raise Mistake(f"it has the number {number[:20]}, and ids are at most {_LARGEST_ID:,}")
    return int(number)


def _problems(settings: dict[str, Any], ids: dict[str, int], added: set[str]) -> list[str]:
    """What is wrong with a tokenizer: settings with which some text is not restored, or is not cut between words."""
    model: dict[str, Any] = settings["model"]
    parting: dict[str, Any] = settings["pre_tokenizer"] or {"type": None}
    tokens: list[dict[str, Any]] = settings["added_tokens"]
    steps = parting["pretokenizers"] if parting["type"] == "Sequence" else [parting]
    loses = [
        s for s in steps if s["type"] not in _KEEPING or s.get("behavior") == "Removed" or s.get("add_prefix_space")
    ]
    around = [(settings[name] or {"type": None})["type"] for name in ("decoder", "post_processor")]
    plain = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    sound = {
        f"its model is {model['type']}": model["type"] == "BPE",
        f"its model has {' or '.join(plain)}": not any(model.get(name) for name in plain),
        "it has a normalizer, truncation or padding": not any(
            settings[name] for name in ("normalizer", "truncation", "padding")
        ),
        f"its pre-tokenizer is {loses[:1]}": not loses,
        "its pre-tokenizer must be ByteLevel once": [s["type"] for s in steps].count("ByteLevel") == 1,
        f"its decoder and post_processor are {around}": around in (["ByteLevel", None], ["ByteLevel", "ByteLevel"]),
        "an added token includes the white space around it": not any(t["lstrip"] or t["rstrip"] for t in tokens),
        "an added token has a space between words": not any(BORDER.search(text + "a") for text in added),
        "an added token reads as other bytes too": all(bytes_of(text) in (None, text.encode()) for text in added),
        "its ids are not 0, 1, 2 and so on": sorted(ids.values()) == list(range(len(ids))),
        "it lacks some of the 256 bytes": ids.keys() >= _CHARACTERS.keys(),
        "a token is no sequence of bytes": all(bytes_of(symbol) is not None for symbol in ids.keys() - added),
    }
    return [problem for problem, is_sound in sound.items() if not is_sound]


def bytes_of(symbol: str) -> bytes | None:
    """The bytes of a token written in GPT-2's characters; None if it contains another character."""
    return bytes(map(_CHARACTERS.__getitem__, symbol)) if _CHARACTERS.keys() >= set(symbol) else None
