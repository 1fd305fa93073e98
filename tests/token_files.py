"""Files of token ids as Megatron and llm.c write them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np


def llm_c(magic: int, ids: Any) -> bytes:
    """A file as https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py writes it."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, 7 if magic == 20240801 else 1, len(ids)
    return header.tobytes() + np.array(ids, "<u4" if magic == 20240801 else "<u2").tobytes()


MEGATRON = {1: "u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def write_megatron(file: Path, texts: list[list[int]], code: int) -> Path:
    """The two files of Megatron's IndexedDatasetBuilder, each document as one sequence."""
    kind = np.dtype(MEGATRON[code])
    np.concatenate(texts).astype(kind).tofile(file)
    sizes = np.array([len(each) for each in texts], "<i4")
    offsets = (np.cumsum(sizes) - sizes).astype("<i8") * kind.itemsize
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(texts), len(texts) + 1)
    firsts = np.arange(len(texts) + 1, dtype="<i8")
    file.with_suffix(".idx").write_bytes(head + sizes.tobytes() + offsets.tobytes() + firsts.tobytes())
    return file
