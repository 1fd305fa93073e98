"""Checkpoints: a folder of safetensors and JSON, there whole or not at all, and never unpickled.

    runs/NAME/checkpoints/step_00004000/
        model.safetensors     the weights; tied ones once, under the first of their names in `model.state_dict()`
        config.json           format, step, validation loss if known, and every setting of the run
        vocab.json            the symbols
        training.safetensors  tensors of the training state (optimizer, memory, random numbers); only to resume
        training.json         its scalars
        SHA256SUMS            checksums, compared whenever a file is read; `sha256sum --check` knows them, too

A folder without the last three is enough to evaluate and generate.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from transformer_xl.baselines import build_model
from transformer_xl.data.vocab import Vocab
from transformer_xl.files import check_seal, remove_folder, remove_unfinished, seal, whole_folder
from transformer_xl.model import TransformerXL
from transformer_xl.recipe import HINTS, fits
from transformer_xl.settings import CorpusConfig, EvalConfig, RunConfig, TrainConfig, TransformerXLConfig

FORMAT = "transformer-xl checkpoint"
VERSION = 1
EXPORTED_VOCAB = "transformer_xl_vocab.json"
"""Where a folder in another program's format keeps the symbols as they are here, for the way back."""

_FILES = ("model.safetensors", "config.json", "vocab.json", "training.safetensors", "training.json")
"""Those of a run's checkpoint."""
_SECTIONS = {"model": TransformerXLConfig, "corpus": CorpusConfig, "train": TrainConfig, "eval": EvalConfig}


@dataclass(frozen=True)
class TrainingState:
    """What resuming needs beyond the weights, flattened: JSON scalars and named tensors."""

    step: int
    scalars: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class LoadedModel(NamedTuple):
    """A trained model in eval mode, its symbols, and the settings of the run it comes from."""

    model: TransformerXL
    vocab: Vocab
    config: RunConfig


def save_checkpoint(
    folder: str | Path,
    *,
    model: nn.Module | Mapping[str, Tensor],
    vocab: Vocab,
    config: RunConfig,
    training: TrainingState | None = None,
    step: int | None = None,
    valid_loss: float | None = None,
    keep: int | None = None,
    report: Sequence[str] = (),
) -> Path:
    """Write a checkpoint whole: on any error nothing new is left behind and older checkpoints stay as they were.

    Args:
        folder: where; `step_folder(run, step)` for a run's own.
        model: a `TransformerXL`, whose own config is what is stored as `config.model`; or its `weights`.
        training: None for a checkpoint that is used and not resumed.
        step: training steps behind the weights; by default those of `training`.
        valid_loss: mean nats per target on the validation split at this very step; `best` compares these.
        keep: prune the run afterwards to so many of the last checkpoints and the best.
        report: what to know about where the weights come from, a sentence each.

    Raises:
        OSError: one sentence with the reason, for instance a full disk.
    """
    folder = Path(folder)
    if step is None:
        step = training.step if training else 0
    known_loss = valid_loss if valid_loss is not None and math.isfinite(valid_loss) else None
    sections = asdict(replace(config, model=getattr(model, "config", config.model)))
    remove_unfinished(folder.parent)
    with whole_folder(folder) as unfinished:
        _write_tensors(unfinished / "model.safetensors", weights(model) if isinstance(model, nn.Module) else model)
        header = {"format": FORMAT, "version": VERSION, "step": step, "valid_loss": known_loss}
        write_json(unfinished / "config.json", header | ({"report": list(report)} if report else {}) | sections)
        write_json(unfinished / "vocab.json", vocab.to_json())
        if training is not None:
            _write_tensors(unfinished / "training.safetensors", training.tensors)
            write_json(unfinished / "training.json", {"step": training.step, "scalars": training.scalars})
        seal(unfinished)
    if keep is not None:
        prune(folder.parent.parent, keep)
    return folder


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A model's weights as it has them, tied ones once, under the first of their names."""
    state = model.state_dict(keep_vars=True)
    return {name: state[name] for name in dict.fromkeys(_first_names(state).values())}


def load_model(path: str | Path, *, device: str | torch.device = "cpu", backend: str = "auto") -> LoadedModel:
    """Load what lies on this machine; `transformer_xl.load_model` tells of it, and takes names on the hub too."""
    folder = find_checkpoint(path)
    config = load_config(folder)
    vocab = load_vocab(folder)
    if len(vocab) != config.model.vocab_size:
        raise ValueError(
            f"{folder} does not fit together: vocab.json has {len(vocab)} symbols and config.json says "
            f"model.vocab_size = {config.model.vocab_size}. Restore the folder from a copy."
        )
    _refuse_absurd(config.model, folder)
    with torch.random.fork_rng(devices=[]):  # initial values are drawn and thrown away; the caller's stream stays
        model = build_model(config.model, backend=backend)
    load_weights(model, folder)
    return LoadedModel(model.to(device).eval(), vocab, config)


def _refuse_absurd(model: TransformerXLConfig, folder: Path) -> None:
    """Hold the sizes against the file of weights before there is a model of them, which may take all memory."""
    size = (folder / "model.safetensors").stat().st_size
    layer = model.d_model * max(model.d_inner, 1 if model.kind in ("lstm", "qrnn") else model.n_head * model.d_head)
    if max(model.n_layer * layer, model.vocab_size, model.positions) > size:
        with _whole_and_ours(folder / "model.safetensors"):
            raise ValueError("config.json tells of more weights")


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Copy a checkpoint's weights into `model`, on its device and in its dtype, and leave its ties as they are.

    Raises:
        ValueError: lists every missing, unexpected and wrong-shaped tensor; nothing is copied then.
    """
    path = find_checkpoint(folder) / "model.safetensors"
    set_weights(model, _read_tensors(path), str(path))


def set_weights(model: nn.Module, stored: Mapping[str, Tensor], source: str) -> None:
    """`load_weights` of tensors that were read from `source`."""
    state = model.state_dict(keep_vars=True)
    names = _first_names(state)
    stored = {names.get(name, name): value for name, value in stored.items()}
    wanted = {name: state[name] for name in names.values()}
    problems = list(_misfits(stored, wanted))
    if problems:
        raise ValueError(f"{source} does not fit the model: {'; '.join(problems)}. Use the config it was saved with.")
    with torch.no_grad():
        for name, value in wanted.items():
            value.copy_(stored[name])


def load_training(folder: str | Path) -> TrainingState:
    """The training state of a checkpoint, its tensors on the CPU.

    Raises:
        FileNotFoundError: the checkpoint was saved without one.
    """
    folder = find_checkpoint(folder, which="last")
    if not (folder / "training.json").exists():
        raise FileNotFoundError(
            f"{folder} holds no training state, so training cannot resume there. Start a new run from it with --init."
        )
    stored = _read_json(folder / "training.json")
    try:
        return TrainingState(stored["step"], stored["scalars"], _read_tensors(folder / "training.safetensors"))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'training.json'} is not a training state: it lacks {error}.") from error


def load_config(folder: str | Path) -> RunConfig:
    """The settings in a checkpoint's `config.json`; ones it lacks take their defaults.

    Raises:
        ValueError: the file is foreign, from a newer version, or lists settings this version does not have.
    """
    path = Path(folder) / "config.json"
    return config_of(_read_header(path), path)


def config_of(stored: Mapping[str, Any], path: Path) -> RunConfig:
    """The settings in JSON read from `path`, a table per section; ones it lacks take their defaults.

    Raises:
        ValueError: it lists settings this version does not have, or values that do not go together.
    """
    strange = [name for name in _SECTIONS if not isinstance(stored.get(name, {}), Mapping)]
    if strange:
        raise ValueError(f"{path} must hold a table for {', '.join(strange)}. Restore it from a copy.")
    unknown = [
        f"{section}.{name}"
        for section, owner in _SECTIONS.items()
        for name in stored.get(section, {})
        if name not in {f.name for f in fields(owner)}
    ]
    if unknown:
        raise ValueError(f"{path} has settings this version does not know: {_some(unknown)}. Update transformer-xl.")
    given = {section: _tuples(stored.get(section, {})) for section in _SECTIONS}
    wrong = [
        f"{section}.{name}"
        for section, values in given.items()
        for name, value in values.items()
        if not fits(value, HINTS[section][name])
    ]
    if wrong:
        raise ValueError(f"{path} has settings of the wrong type: {_some(wrong)}. Restore it from a copy.")
    if "vocab_size" not in given["model"]:
        raise ValueError(f"{path} lacks model.vocab_size. Restore it from a copy.")
    return RunConfig(**{section: owner(**given[section]) for section, owner in _SECTIONS.items()})


def load_vocab(folder: str | Path) -> Vocab:
    """The symbols in a checkpoint's `vocab.json`."""
    path = Path(folder) / "vocab.json"
    stored = _read_json(path)
    try:
        return Vocab.from_json(stored)
    except ValueError as error:
        raise ValueError(f"{path} is no vocabulary: {error}") from error


def step_folder(run: str | Path, step: int) -> Path:
    """Where a run keeps its checkpoint of that step."""
    return Path(run) / "checkpoints" / f"step_{step:08d}"


def checkpoints(run: str | Path) -> list[Path]:
    """A run's whole checkpoints, oldest first."""
    found = [(int(m[1]), p) for p in Path(run).glob("checkpoints/*") if (m := re.fullmatch(r"step_(\d+)", p.name))]
    return [path for _, path in sorted(found)]


def latest(run: str | Path) -> Path | None:
    """A run's last checkpoint; None before the first."""
    return next(reversed(checkpoints(run)), None)


def best(run: str | Path) -> Path | None:
    """A run's checkpoint of the lowest known validation loss, the later of equals; None where none is known.

    Raises:
        ValueError, FileNotFoundError: a checkpoint is damaged, and might be the best.
    """
    return _lowest(run, valid_loss)


def _lowest(run: str | Path, loss_of: Callable[[Path], float | None]) -> Path | None:
    losses = [(loss_of(path), path) for path in reversed(checkpoints(run))]
    known = [(loss, path) for loss, path in losses if loss is not None]
    return min(known, key=lambda entry: entry[0])[1] if known else None


def _loss_if_sound(folder: Path) -> float | None:
    with suppress(ValueError, FileNotFoundError):
        return valid_loss(folder)
    return None


def valid_loss(folder: str | Path) -> float | None:
    """The validation loss a checkpoint was saved with, in nats per target; None if it was not measured."""
    return _read_header(Path(folder) / "config.json").get("valid_loss")


def prune(run: str | Path, keep: int) -> None:
    """Remove a run's checkpoints but the last `keep` and the best."""
    assert keep >= 1, f"prune must keep at least one checkpoint, got keep={keep}"
    kept = {*checkpoints(run)[-keep:], _lowest(run, _loss_if_sound)}  # damage is no reason to stop a run
    for path in checkpoints(run):
        if path not in kept:
            remove_folder(path)


def put_damaged_aside(run: str | Path, warn: Callable[[str], None]) -> None:
    """Rename a run's checkpoints that are not what was written, so that what comes before them counts; `warn` is told
    of each."""
    for folder in checkpoints(run):
        try:
            for name in _FILES:
                with _whole_and_ours(folder / name):
                    (folder / name).stat()
                    check_seal(folder / name)
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and error.errno != errno.EIO:
                raise
            aside = folder.with_name(f"damaged_{folder.name}")
            if aside.exists():
                remove_folder(aside)
            folder.rename(aside)
            warn(f"{error} It is {aside.name} now, and does not count.")


def find_checkpoint(path: str | Path, which: Literal["best", "last"] = "best") -> Path:
    """The checkpoint folder that `path` means: itself, or a run's best (by default; else its last) one.

    Raises:
        FileNotFoundError: there is nothing at `path`, or no checkpoint in it.
    """
    path = Path(path)
    if path.is_dir():
        if (path / "model.safetensors").exists():
            return path
        found = (best(path) if which == "best" else None) or latest(path)
        if found is not None:
            return found
        reason = "holds no checkpoint"
    else:
        reason = "is a file" if path.exists() else "does not exist"
    raise FileNotFoundError(
        f"{path} {reason}. Name a run folder that `txl train` wrote, or one of the folders in its checkpoints/."
    )


def _first_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Each name, mapped to the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in state.items()}


def _misfits(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Iterator[str]:
    missing = [name for name in wanted if name not in stored]
    unexpected = [name for name in stored if name not in wanted]
    wrong = [
        f"{name} is {dimensions(stored[name].shape)} in the file and {dimensions(value.shape)} in the model"
        for name, value in wanted.items()
        if name in stored and stored[name].shape != value.shape
    ]
    for kind, found in (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong)):
        if found:
            yield f"{kind}: {_some(found)}"


def _some(names: Iterable[str], shown: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def dimensions(shape: torch.Size) -> str:
    """A shape in words: 2x3."""
    return "x".join(map(str, shape)) or "a scalar"


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
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


def _read_tensors(path: Path) -> dict[str, Tensor]:
    with _whole_and_ours(path):
        check_seal(path)
        return load_file(path)


def write_json(path: Path, content: Any) -> None:
    """Write JSON that people may read."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_json(path: Path) -> Any:
    with _whole_and_ours(path):
        check_seal(path)
        return json.loads(path.read_text(encoding="utf-8"))


def _read_header(path: Path) -> dict[str, Any]:
    stored = _read_json(path)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a checkpoint of transformer-xl: its format must be {FORMAT!r}. `txl convert` reads "
            "those of other programs."
        )
    if stored.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {stored.get('version')}; this transformer-xl reads {VERSION}. Update it."
        )
    return stored


@contextmanager
def _whole_and_ours(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing, so its folder is no whole checkpoint. Use another one.") from None
    except (SafetensorError, ValueError, RecursionError) as error:  # a JSON file's faults are ValueErrors
        raise ValueError(
            f"{path} is cut short, damaged or of another kind ({error}). Use another checkpoint, or restore this one."
        ) from error


def _tuples(section: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists where the settings have tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in section.items()}
