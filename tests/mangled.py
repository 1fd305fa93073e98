"""Bad input made from good: bytes, trees of JSON, values of TOML and operations of pickles changed by a throw of dice.

Each takes a `random.Random`, so that a seed makes the same input again.
"""

from __future__ import annotations

import contextlib
import json
import pickletools
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

ODD_TEXTS = ["", "a", "\0", "\ud800", "\u00e9\u4e2d\U0001f600", "x" * 5000, "../../x", "/etc/passwd", "~nobody/x", "\n"]
ODD_NUMBERS = [0, -1, 1, 2, 3, 7, 255, 256, 10**12, 2**31, 2**63, 2**64, 10**30, -(10**30)]
ODD_FRACTIONS = [0.0, -0.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"), -float("inf")]
ODD_BYTES = [
    *(
        b"\0",
        b"\xff",
        b"\n",
        b"\r\n",
        b"\xed\xa0\x80",
        b"9" * 5000,
        b"0x" + b"f" * 5000,
        b"-1",
        b"1e400",
        b"NaN",
        b"null",
    ),
    *(b"[]", b"{}", b'"', b"[" * 5000, b'{"a":' * 3000, b"\\ud800", b"1979-05-27T07:32:00+99:99", b"'''"),
]
ODD_TOML = [
    *("1979-05-27", "07:32:00", "[1979-05-27T07:32:00Z]", "[[1], [2]]", "{a = 1, b = {c = 2}}", "[nan, inf]", "[1,]"),
    *("0x" + "f" * 5000, "9" * 5000, "[" * 2000 + "]" * 2000, "1_000", "0b1", "+5", "'a'", "[]", "[-1, 5]", ""),
]


def mangled(dice: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """`data` with a few of its bytes changed, or parts of it cut, doubled, or replaced by those of another file."""
    content = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        place = dice.randrange(len(content) + 1)
        end = min(len(content), place + dice.choice([1, 2, 8, 64, 1 << 20]))
        match dice.randrange(7):
            case 0 if content:
                content[min(place, len(content) - 1)] ^= 1 << dice.randrange(8)
            case 1 if content:
                content[min(place, len(content) - 1)] = dice.randrange(256)
            case 2:
                del content[place:end]
            case 3:
                content[place:place] = content[place:end][:4096]
            case 4:
                content[place:end] = dice.choice(ODD_BYTES)
            case 5 if other:
                start = dice.randrange(len(other))
                content[place:end] = other[start : start + dice.choice([1, 8, 64, 1 << 20])]
            case _:
                content[place:end] = dice.randbytes(min(end - place, 16))
    return bytes(content)


def odd(dice: random.Random, depth: int = 2) -> Any:
    """A value that JSON can hold and a setting seldom should."""
    kinds: list[Callable[[], Any]] = [
        lambda: dice.choice([None, True, False]),
        *(lambda values=values: dice.choice(values) for values in (ODD_NUMBERS, ODD_FRACTIONS, ODD_TEXTS)),
    ]
    if depth:
        kinds += [
            lambda: [odd(dice, depth - 1) for _ in range(dice.randrange(3))],
            lambda: {str(odd(dice, 0)): odd(dice, depth - 1) for _ in range(dice.randrange(3))},
        ]
    return dice.choice(kinds)()


def mangled_json(dice: random.Random, data: bytes) -> bytes:
    """A tree with some of its parts replaced, taken away or swapped; sometimes its bytes are mangled too."""
    try:
        tree = [json.loads(data)]
    except (ValueError, RecursionError):  # it was mangled before
        return mangled(dice, data)
    for _ in range(dice.choice([1, 1, 2, 3])):
        places = list(_places(tree))
        named = [place for place in places if isinstance(place[0], dict)]
        holder, key = dice.choice(named if named and dice.random() < 0.5 else places)  # else long lists get them all
        value = holder[key]
        match dice.randrange(5):
            case 2 if isinstance(value, int | float) and not isinstance(value, bool):
                holder[key] = value + dice.choice([-1, 1, 0.5, 2**31, -value, value])
            case 3 if holder is not tree:
                del holder[key]
            case 4:
                other, there = dice.choice(places)
                with contextlib.suppress(LookupError):
                    holder[key], other[there] = other[there], value
            case _:
                holder[key] = odd(dice)
    try:
        content = json.dumps(tree[0]).encode()
    except (ValueError, RecursionError):  # a part was swapped with what holds it
        return mangled(dice, data)
    return mangled(dice, content) if dice.random() < 0.2 else content


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    todo = [tree]
    while todo:
        holder = todo.pop()
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            if isinstance(holder[key], dict | list):
                todo.append(holder[key])


def mangled_safetensors(dice: random.Random, data: bytes) -> bytes:
    """Its header, a tree of JSON, mangled, with its right length in front."""
    size = int.from_bytes(data[:8], "little")
    header = mangled_json(dice, data[8 : 8 + size])
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def toml_value(dice: random.Random) -> str:
    """A value of TOML, of any kind, or what is none."""
    value = odd(dice, 0)
    if value is None or dice.random() < 0.3:
        return dice.choice(ODD_TOML)
    if isinstance(value, float | bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else str(value)


def operations(content: bytes) -> list[bytes]:
    """A pickle's operations, each with what stands behind it; none where it is no pickle."""
    try:
        places = [place for _, _, place in pickletools.genops(content) if place is not None]
    except Exception:  # pickletools has no error of its own
        return []
    return [content[start:end] for start, end in zip(places, [*places[1:], places[-1] + 1], strict=True)]


def mangled_pickle(dice: random.Random, parts: list[bytes], pool: list[bytes]) -> bytes:
    """Some operations of a pickle taken away, doubled or changed, and others put between them."""
    parts = list(parts)
    for _ in range(dice.choice([1, 2, 4])):
        place = dice.randrange(len(parts) + 1)
        match dice.randrange(5):
            case 0:
                del parts[place : place + dice.choice([1, 2])]
            case 1:
                parts[place:place] = parts[place : place + dice.choice([1, 8])] * dice.choice([1, 9])
            case 2 if place < len(parts):
                parts[place] = mangled(dice, parts[place])[:64]
            case _:
                parts[place:place] = dice.choices(pool, k=dice.choice([1, 2]))
    return b"".join(parts) + b"." * dice.randrange(2)
