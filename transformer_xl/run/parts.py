"""The files of a checkpoint: tensors and JSON, compared with their checksums when they are read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..mistake import Mistake
from ..runtime.files import check_seal, plain_file

FORMAT = "transformer-xl checkpoint"
VERSION = 2
EXPORTED_VOCAB = "transformer_xl_vocab.json"
"""The file of an exported folder with this package's vocabulary, for importing it again."""
FILES = ("model.safetensors", "config.json", "vocab.json", "training.safetensors", "training.json")
"""The files of a run's checkpoint."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors; convert the library's error of writing to the `OSError` that caused it."""
    try:
        save_file({name: _own_storage(value) for name, value in tensors.items()}, path)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def _own_storage(value: Tensor) -> Tensor:
    """The tensor on the CPU, contiguous and with its own storage, as the format requires."""
    value = value.detach().cpu().contiguous()
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors in a file and compare its checksum."""
    with name_damage(path):
        check_seal(path)
        return load_file(plain_file(path))


def write_json(path: Path, content: object) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read the JSON in a file and compare its checksum."""
    with name_damage(path):
        check_seal(path)
        return json.loads(plain_file(path).read_text(encoding="utf-8"))


def read_header(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's `config.json`; other formats and versions are refused."""
    stored = read_json(path)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise Mistake(
            f"{path} is not a checkpoint of transformer-xl: its format must be {FORMAT!r}. `txl convert` reads "
            "checkpoints of other programs."
        )
    if stored.get("version") != VERSION:
        raise Mistake(
            f"{path} has format version {stored.get('version')}, and this transformer-xl reads {VERSION}. Use the "
            "release that wrote it, or a newer one."
        )
    return stored


@contextmanager
def name_damage(path: Path) -> Iterator[None]:
    """Turn an error in a file of a checkpoint into a sentence that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing, so its folder is no whole checkpoint. Use another one.") from None
    except (SafetensorError, ValueError, RecursionError) as error:  # errors in JSON are ValueErrors
        raise Mistake(
            f"{path} is cut short, damaged or of another kind ({error}). Use another checkpoint, or restore this one."
        ) from error
