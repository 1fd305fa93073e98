"""Refuse files that are neither text nor ids as they are read here, by what they hold and what lies beside them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from jaxtyping import UInt16

from ..mistake import Mistake
from .reading import open_file, read_errors

_SAMPLE = 1 << 20
_FORMATS: dict[bytes, str] = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x93NUMPY": 'a NumPy file, which corpus.unit = "id" reads',
    b"\x89HDF\r\n": "an HDF5 file",
    b"SQLite format 3\0": "an SQLite database",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x89PNG\r\n": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF-": "a PDF document",
    b"GGUF": "a GGUF model",
}
"""Formats whose content is not their bytes, by their first bytes."""
_TOKENS = re.compile(rb'\s*\{\s*"(?:ids|tokens)"\s*:\s*\[')
_LLM_C = 20240520, 20240801
"""The first number of the files of llm.c, whose header has 1,024 bytes."""
_FEW = 16
"""The higher halves of 32-bit ids are below this: vocabularies have at most 2^20 ids."""


def container_of(file: Path) -> str:
    """What a file is whose bytes are a container's, not a text's, in words; "" for any other."""
    with read_errors(file), open_file(file) as opened:
        head = opened.read(64)
    if file.suffix in (".pkl", ".pickle", ".pt", ".pth") and head.startswith((b"\x80", b"PK")):
        return "a pickle, which stays closed"
    if file.suffix == ".json" and _TOKENS.match(head):
        return 'a file of token ids, as MidiTok writes them; corpus.unit = "id" reads ids in a .npy file'
    return next((kind for magic, kind in _FORMATS.items() if head.startswith(magic)), "")


def refuse_container(file: Path) -> None:
    """Refuse to read a container as text."""
    if kind := container_of(file):
        raise Mistake(f"{file} must be text, and is {kind}. Write its text as .txt, or as JSON lines (.jsonl).")


def refuse_saved_dataset(folder: Path) -> None:
    """Refuse a folder that `save_to_disk` of the library datasets wrote: its text is in Arrow files."""
    if (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("dataset_info.json", "state.json")
    ):
        raise Mistake(
            f"{folder} must hold text, and is a dataset that save_to_disk of the library datasets wrote. Load it, and "
            'write each split as JSON lines: dataset["train"].to_json("train.jsonl").'
        )


def refuse_other_ids(file: Path, ids: UInt16[np.ndarray, " N"]) -> None:
    """Refuse a `.bin` file of other ids than raw uint16: of llm.c, of Megatron, or of 32 or 64 bits."""
    kind, sample = "", ids[:_SAMPLE]
    if file.with_suffix(".idx").exists():
        kind = f"belongs to {file.with_suffix('.idx').name}, as Megatron writes it"
    elif len(ids) >= 2 and int(ids[0]) + (int(ids[1]) << 16) in _LLM_C:
        kind = "has the header of llm.c"
    elif len(sample) >= _FEW:
        low, high = sample[0::2], sample[1::2]
        wider = int(high.max()) < _FEW and (int(high.max()) == 0 or int(low.max()) >= _FEW * _FEW)
        kind = "is one of wider ids: every second number is nearly 0" if wider and int(low.max()) else ""
    if kind:
        raise Mistake(f"{file} must hold raw uint16 ids, and {kind}. Save the ids as .npy (numpy.save).")
