"""`txl convert`: other programs' checkpoints in, and ours out to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from transformer_xl.checkpoint import LoadedModel, save_checkpoint
from transformer_xl.data.corpus import Corpus
from transformer_xl.data.datasets import store_folder
from transformer_xl.data.vocab import Vocab
from transformer_xl.interop import Program, load_model, read_model, read_vocabulary, write_original
from transformer_xl.recipe import changed_settings

Format = Literal["huggingface", "original"]
Read = tuple[LoadedModel, list[str]]
"""A model, and what to know about where it comes from."""


def convert(
    source: str,
    to: Path,
    *,
    program: Program | None = None,
    to_format: Format | None = None,
    vocab: str | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Write what `source` holds to the folder `to`: as a checkpoint of ours, or in `to_format`.

    Args:
        source: a file or folder that `program` wrote; where that is None, a run of ours or `hf:NAME`.
        vocab: a file with the symbols, or the name of a prepared corpus, where the source holds none.
        overrides: settings to change, `--section.field value ...`.

    Raises:
        ValueError, OSError: a sentence for what does not fit; nothing is written then.
    """
    if program is None and to_format is None:
        raise ValueError("Say what SRC is by --from, or what to make of a run by --to-format.")
    if to.exists():
        raise FileExistsError(f"--to must be a new folder, and {to} exists. Choose another, or remove it.")
    loaded, report = _foreign(source, program, vocab, overrides) if program else _own(source, vocab, overrides)
    if to_format == "huggingface":
        from transformer_xl.hf import export_huggingface

        export_huggingface(loaded, to)
    elif to_format == "original":
        report += write_original(loaded, to)
    else:
        save_checkpoint(to, model=loaded.model, vocab=loaded.vocab, config=loaded.config, report=report)
    print("\n".join([f"{to}: {_title(loaded)}", *(f"  {line}" for line in report)]))


def _foreign(source: str, program: Program, vocab: str | None, overrides: Sequence[str]) -> Read:
    symbols, notes = (None, []) if vocab is None else _vocab(vocab)
    found = read_model(source, program, overrides, vocab=symbols)
    if found.vocab is None:
        raise ValueError(
            f"{source} holds no vocabulary: give --vocab, a cache.pt, cache.pkl or vocab.pkl, a text file (.txt) with "
            "a word a line, or the name of a corpus that `txl data` prepared as for its training."
        )
    return found.loaded(), found.report + notes


def _own(run: str, vocab: str | None, overrides: Sequence[str]) -> Read:
    if vocab is not None:
        raise ValueError(f"--vocab is for what other programs wrote, and {run} has its own. Leave it out.")
    loaded = load_model(run)
    config, changed = changed_settings(loaded.config, overrides)
    if asdict(config.model) != asdict(loaded.config.model):
        shaping = [setting.label for setting in changed if setting.section == "model"]
        raise ValueError(f"{', '.join(shaping)} would be another model than the weights are. Leave it out.")
    return loaded._replace(config=config), []


def _vocab(name: str) -> tuple[Vocab, list[str]]:
    if Path(name).is_file():
        return read_vocabulary(Path(name))
    store = store_folder(name, "")
    if not (store / "corpus.json").is_file():
        raise FileNotFoundError(f"--vocab must be a file or the name of a prepared corpus, and there is no {name}.")
    return Corpus.open(store).vocab, []


def _title(loaded: LoadedModel) -> str:
    weights = sum(parameter.numel() for parameter in loaded.model.parameters())
    return f"{loaded.model.config.n_layer} layers, {weights:,} weights, {loaded.vocab}"
