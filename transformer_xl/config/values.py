"""Read values of settings from a command line, check their types, and describe them in messages."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

from ..mistake import join_words

_LARGEST, _LARGEST_WHOLE, _LONGEST = sys.float_info.max, 2**63 - 1, 200

Hint: TypeAlias = Any
"""The type of a setting, as `typing.get_type_hints` gives it."""
Value: TypeAlias = Any
"""The value of a setting, of any type until `fits` has checked it."""


def from_words(words: Sequence[str], hint: Hint) -> Value:
    """The value in words of a command line. A word of the wrong type stays a string, which `fits` refuses."""
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return [_from_word(word, item) for word in re.split(r"[\s,\[\]()]+", " ".join(words)) if word]
    return _from_word(words[0], hint)


def _from_word(word: str, hint: Hint) -> Value:
    kinds = alternatives(hint)
    if type(None) in kinds and word.lower() == "none":
        return None
    if bool in kinds and word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            with suppress(ValueError):
                return kind(word)
    return word


def alternatives(hint: Hint) -> tuple[Hint, ...]:
    """The members of a union type, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def fits(value: Value, hint: Hint) -> bool:
    """Whether a value has the type of a setting. True and NaN do not count as numbers. All items of a tuple have one
    type."""
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST_WHOLE
    if len(alternatives(hint)) > 1:
        return any(fits(value, kind) for kind in alternatives(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        kind, *more = get_args(hint)
        sized = isinstance(value, tuple) and (more == [Ellipsis] or len(value) == 1 + len(more))
        return sized and all(fits(item, kind) for item in value)
    return isinstance(value, hint)


def as_float(value: Value, hint: Hint) -> Value:
    """The value, as a float if the type is float, so a config that is written and read again is equal."""
    if isinstance(value, tuple):
        return tuple(as_float(item, get_args(hint)[0]) for item in value)
    return float(value) if float in alternatives(hint) and value is not None else value


def type_text(hint: Hint) -> str:
    """The description of a type in an error message."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if type(None) in alternatives(hint):
        return f"{type_text(get_args(hint)[0])} (or none)"
    if get_origin(hint) is Literal:
        return join_words((f'"{choice}"' for choice in get_args(hint)), "or")
    if get_origin(hint) is tuple:
        items = get_args(hint)
        many = {int: "whole numbers", float: "numbers", bool: "values that are true or false", str: "texts"}
        many |= {int | None: "whole numbers (or none)"}
        what = many.get(items[0]) or type_text(items[0])
        return f"a list of {what}" if Ellipsis in items else f"{len(items)} {what}"
    return names[hint]


def value_text(value: Value) -> str:
    """A value as the user wrote it, or the beginning of it."""
    try:
        text = json.dumps(value, default=str) if isinstance(value, str | bool | list) else str(value)
    except ValueError:
        text = "a number of thousands of digits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
