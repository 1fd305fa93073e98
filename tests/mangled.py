"""Bad input made from good: bytes changed by a throw of dice, a `random.Random`, so that a seed repeats it."""

from __future__ import annotations

import random

ODD_TEXTS = ["", "a", "\0", "\ud800", "\u00e9\u4e2d\U0001f600", "../../x", "/etc/passwd", "~nobody/x", "\n"]
ODD_BYTES = [
    *(b"\0", b"\xff", b"\n", b"\r\n", b"\xed\xa0\x80", b"9" * 5000, b"0x" + b"f" * 5000, b"-1", b"1e400", b"NaN"),
    *(b"null", b"[]", b"{}", b'"', b"[" * 5000, b'{"a":' * 3000, b"\\ud800", b"1979-05-27T07:32:00+99:99", b"'''"),
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
