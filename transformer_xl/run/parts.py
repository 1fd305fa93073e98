"""The files of a checkpoint, compared with their checksums when they are read, and a model's weights by name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..mistake import Mistake, listing, shortened
from ..runtime.files import check_seal, plain_file

FORMAT = "transformer-xl checkpoint"
VERSION = 2
EXPORTED_VOCAB = "transformer_xl_vocab.json"
"""The file of an exported folder with this package's vocabulary, for importing it again."""
FILES_TO_READ = ("model.safetensors", "config.json", "vocab.json")
"""The files that a model is read from."""
FILES = (*FILES_TO_READ, "training.safetensors", "training.json")
"""The files of a run's checkpoint."""
WEIGHT_TYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
"""Types of weights in a file. Integers and float8 are weights that were divided by scales, which a model lacks."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors."""
    with write_errors():
        save_file({name: _own_storage(value) for name, value in tensors.items()}, path)


@contextmanager
def write_errors() -> Iterator[None]:
    """Convert the library's error of writing to the `OSError` that caused it."""
    try:
        yield
    except SafetensorError as error:
        code = re.search(r"(?:os error|code:) (\d+)", str(error))
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


def read_header(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's `config.json`; other formats and versions are refused."""
    path = folder / "config.json"
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
        reason = str(error) if isinstance(error, Mistake) else shortened(str(error))
        raise Mistake(
            f"{path} is cut short, damaged or of another kind ({reason}). Use another checkpoint, or restore this one."
        ) from error


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A model's weights by name. Tied weights have only the first of their names."""
    state = model.state_dict(keep_vars=True)
    return {name: state[name] for name in dict.fromkeys(first_names(state).values())}


def set_weights(model: nn.Module, stored: Mapping[str, Tensor], source: str) -> None:
    """Do the work of `load_weights` with tensors that were read from `source`: all weights have to fit."""
    state = model.state_dict(keep_vars=True)
    names = first_names(state)
    stored = {names.get(name, name): value for name, value in stored.items()}
    wanted = {name: state[name] for name in names.values()}
    found = {name: (stored[name], value) for name, value in wanted.items() if name in stored}
    shapes = {name: (dimensions(given.shape), dimensions(own.shape)) for name, (given, own) in found.items()}
    types = {name: given.dtype for name, (given, _) in found.items() if given.dtype not in WEIGHT_TYPES}
    faults = {
        "missing": [name for name in wanted if name not in stored],
        "unexpected": [name for name in stored if name not in wanted],
        "wrong shape": [f"{name} is {a} in the file and {b} in the model" for name, (a, b) in shapes.items() if a != b],
        "wrong type": [f"{name} is {str(dtype).removeprefix('torch.')}" for name, dtype in types.items()],
    }
    problems = [f"{kind}: {listing(names)}" for kind, names in faults.items() if names]
    if problems:
        raise Mistake(f"{source} does not fit the model: {'; '.join(problems)}. Use the config it was saved with.")
    with torch.no_grad():
        for name, value in wanted.items():
            value.copy_(stored[name])


def first_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Each name, mapped to the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in state.items()}


def dimensions(shape: torch.Size) -> str:
    """A shape in words: 2x3."""
    return "x".join(map(str, shape)) or "a scalar"
