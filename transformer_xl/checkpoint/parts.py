"""The files of a checkpoint: tensors and JSON, held against their checksums when they are read."""

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
READABLE = (1, VERSION)
"""Version 1 is read too: it names weights without `backbone.`, and numbers the moments of optimizers."""
EXPORTED_VOCAB = "transformer_xl_vocab.json"
"""Where a folder in another program's format keeps the symbols as they are here, for the way back."""
FILES = ("model.safetensors", "config.json", "vocab.json", "training.safetensors", "training.json")
"""Those of a run's checkpoint."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise the library's failure to write as the `OSError` it stands for."""
    try:
        save_file({name: _own_storage(value) for name, value in tensors.items()}, path)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def _own_storage(value: Tensor) -> Tensor:
    """Contiguous on the CPU and alone in its storage, as the format wants it."""
    value = value.detach().cpu().contiguous()
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def read_tensors(path: Path) -> dict[str, Tensor]:
    with whole_and_ours(path):
        check_seal(path)
        return load_file(plain_file(path))


def write_json(path: Path, content: Any) -> None:
    """Write JSON that people may read."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    with whole_and_ours(path):
        check_seal(path)
        return json.loads(plain_file(path).read_text(encoding="utf-8"))


def read_header(path: Path) -> dict[str, Any]:
    stored = read_json(path)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise Mistake(
            f"{path} is not a checkpoint of transformer-xl: its format must be {FORMAT!r}. `txl convert` reads "
            "those of other programs."
        )
    if stored.get("version") not in READABLE:
        raise Mistake(
            f"{path} has format version {stored.get('version')}; this transformer-xl reads at most {VERSION}. "
            "Update it."
        )
    return stored


@contextmanager
def whole_and_ours(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing, so its folder is no whole checkpoint. Use another one.") from None
    except (SafetensorError, ValueError, RecursionError) as error:  # a JSON file's faults are ValueErrors
        raise Mistake(
            f"{path} is cut short, damaged or of another kind ({error}). Use another checkpoint, or restore this one."
        ) from error
