"""Convert a `Vocab` to a fast tokenizer of transformers, with the same ids and the same decoded text.

Unlike a `Vocab`, it takes only text, not bytes. If a vocabulary without `<unk>` lacks a token, the tokenizers library
raises the error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ...data.subwords import CHARACTERS
from ...data.vocab import LINE_ENDS, UNK, Vocab
from .tokenization_transformer_xl import TransformerXLTokenizer

_SPACES = "".join(filter(str.isspace, map(chr, range(sys.maxunicode + 1))))
"""The white space of `str.split`. The tokenizers library has fewer characters."""
_FF = "\u00ff"
"""The byte 0xFF as byte-level tokenizers write it."""
_PADDING = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")
"""Spellings of an added token for padding."""


def fast_tokenizer(vocab: Vocab, end: int | None = None) -> TransformerXLTokenizer:
    """The tokenizer of `vocab`, for texts padded on the left.

    `bos_token` and `eos_token` are the line end; without one, `bos_token` is token 0 and there is no `eos_token`. Bytes
    and byte pairs are padded with byte 0xFF, which no UTF-8 text contains. Other units have no padding token: it would
    be a real token, which collators mask in the labels. A tokenizer with added tokens has no bos token, because a text
    could contain it; its padding token is one of `_PADDING`, if it is added. `end`, the id that ends a document, is the
    `eos_token`.
    """
    tokenizer = {"word": _words, "char": _chars, "byte": _bytes, "bpe": _pairs}[vocab.unit](vocab)
    added = tokenizer.get_added_tokens_decoder()
    begin = None if added else tokenizer.id_to_token(vocab.line_end or 0)
    padding = _FF if not (added or vocab.is_text or tokenizer.token_to_id(_FF) is None) else None
    if added:
        padding = next((each.content for each in added.values() if each.content in _PADDING), None)
    last = None if vocab.line_end is None else begin
    if len(vocab.opening_ids):
        first = LINE_ENDS[vocab.newlines]
        special = [(first, vocab.line_end)]
        tokenizer.post_processor = processors.TemplateProcessing(f"{first} $A", f"{first} $A $B", special)  # type: ignore[arg-type]
    return TransformerXLTokenizer(
        tokenizer_object=tokenizer,
        bos_token=begin,
        eos_token=last if end is None else tokenizer.id_to_token(end),
        pad_token=padding,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        split_special_tokens=not added,  # "a<eos>b" is one word
    )


def _words(vocab: Vocab) -> Tokenizer:
    end = LINE_ENDS.get(vocab.newlines)
    unk = UNK if vocab.unk is None else str(vocab.symbols[vocab.unk])
    tokenizer = Tokenizer(models.WordLevel(_ids(vocab.symbols), unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"[{re.escape(_SPACES)}]+"), "removed")
    steps: list[Any] = [decoders.WordPiece(prefix="\n", cleanup=False), decoders.Fuse()]  # a space between words
    if end is not None:
        tokenizer.normalizer = normalizers.Replace("\n", f" {end} ")
        steps.append(decoders.Replace(Regex(f" ?(?<![^ ]){re.escape(end)}(?![^ ]) ?"), "\n"))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _chars(vocab: Vocab) -> Tokenizer:
    tokenizer = _single(vocab.symbols, vocab)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(UNK, "\ufffd"), decoders.Fuse()])
    return tokenizer


def _bytes(vocab: Vocab) -> Tokenizer:
    by_byte = {byte: character for character, byte in CHARACTERS.items()}
    tokenizer = _single([by_byte[int(symbol)] for symbol in vocab.symbols], vocab)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pairs(vocab: Vocab) -> Tokenizer:
    tokenizer = Tokenizer.from_str(vocab.tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if not isinstance(tokenizer.post_processor, processors.ByteLevel):  # it would add tokens to a text
        tokenizer.post_processor = None  # type: ignore[assignment]
    if vocab.newlines == "drop":
        own = tokenizer.normalizer
        drop = normalizers.Replace("\n", "")
        tokenizer.normalizer = normalizers.Sequence([drop, own]) if own is not None else drop
    return tokenizer


def _single(symbols: Iterable[Any], vocab: Vocab) -> Tokenizer:
    """Byte pairs without merges: each character is a token."""
    tokenizer = Tokenizer(models.BPE(_ids(symbols), [], unk_token=UNK))
    if vocab.newlines == "drop":
        tokenizer.normalizer = normalizers.Replace("\n", "")
    return tokenizer


def _ids(symbols: Iterable[Any]) -> dict[str, int]:
    return {str(symbol): i for i, symbol in enumerate(symbols)}
