"""`txl convert`: import checkpoints of other programs, and export ours to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ...checkpoint import save_checkpoint
from ...config.recipe import changed_settings
from ...data.corpus import Corpus
from ...data.datasets import store_folder
from ...data.vocab import Vocab
from ...interop import Imported, Program, check_vocabulary, load_model, read_model, read_vocabulary, write_original
from ...mistake import Mistake

Format = Literal["huggingface", "original"]

_OF_THE_CALL = {
    *("dropout", "dropatt", "init_std", "proj_init_std"),
    *("layer_norm_epsilon", "embedding_scale", "zero_memory", "pre_lnorm"),
}
"""Settings of a model that do not shape its weights."""


def convert(
    source: str,
    to: Path,
    *,
    program: Program | None = None,
    to_format: Format | None = None,
    vocab: str | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Write the model in `source` to the folder `to`: as a checkpoint of ours, or in `to_format`.

    Args:
        source: a file or folder that `program` wrote; if that is None, a run of ours or `hf:NAME`.
        vocab: a file with the vocabulary, or the name of a prepared corpus, if the source holds none.
        overrides: settings to change, `--section.field value ...`.

    Raises:
        Mistake, OSError: a sentence for each mistake; nothing is written then.
    """
    if program is None and to_format is None:
        raise Mistake("Say which program wrote SRC by --from, or what to make of a run by --to-format.")
    if to.exists():
        raise FileExistsError(f"--to must be a new folder, and {to} exists. Choose another, or remove it.")
    found = _foreign(source, program, vocab, overrides) if program else _own(source, vocab, overrides)
    loaded, report = found.loaded(), found.report
    if to_format == "huggingface":
        from ...interop.hf.export import export_huggingface

        export_huggingface(loaded, to)
    elif to_format == "original":
        report = report + write_original(loaded, to)
    else:
        save_checkpoint(to, model=loaded.model, vocab=loaded.vocab, config=loaded.config, report=report)
    weights = sum(parameter.numel() for parameter in loaded.model.parameters())
    print("\n".join([f"{to}: {weights:,} weights, {loaded.vocab}", *(f"  {line}" for line in report)]))


def _foreign(source: str, program: Program, vocab: str | None, overrides: Sequence[str]) -> Imported:
    symbols, notes = (None, []) if vocab is None else _vocab(vocab)
    found = read_model(source, program, overrides, vocab=symbols)
    return replace(found, report=found.report + notes)


def _own(run: str, vocab: str | None, overrides: Sequence[str]) -> Imported:
    if vocab is not None:
        raise Mistake(f"--vocab is for checkpoints of other programs, and {run} has its own vocabulary. Leave it out.")
    loaded = load_model(run)
    config, changed = changed_settings(loaded.config, overrides)
    shaping = [setting.label for setting in changed if setting.section == "model" and setting.field not in _OF_THE_CALL]
    if shaping:
        raise Mistake(f"{', '.join(shaping)} shapes weights, and the weights of {run} have their shape. Leave it out.")
    check_vocabulary(config, loaded.vocab)
    return Imported(config, dict(loaded.model.state_dict()), loaded.vocab, [])


def _vocab(name: str) -> tuple[Vocab, list[str]]:
    if Path(name).is_file():
        return read_vocabulary(Path(name))
    store = store_folder(name, "")
    if not (store / "corpus.json").is_file():
        raise FileNotFoundError(f"--vocab must be a file or the name of a prepared corpus, and there is no {name}.")
    return Corpus.open(store).vocab, []
