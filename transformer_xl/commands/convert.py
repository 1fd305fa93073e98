"""`txl convert`: import checkpoints of other programs, and export ours in their formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from ..config.recipe import changed_settings
from ..mistake import Mistake

if TYPE_CHECKING:
    from ..data.vocab import Vocab
    from ..interop import Imported

_OF_THE_CALL = {
    *("dropout", "dropatt", "init_std", "proj_init_std"),
    *("layer_norm_epsilon", "embedding_scale", "zero_memory", "pre_lnorm", "relu_output", "gate_bias"),
}
"""Settings of a model that do not change the shapes of its weights."""


@dataclass(frozen=True)
class Convert:
    """Import and export checkpoints of other programs.

    Any setting that `txl train --help` lists can be given as --section.field value."""

    source: Annotated[Positional[str], arg(metavar="SRC")]
    """With --from, a checkpoint of another program; with --to-format, a run."""
    to: Annotated[Path, arg(metavar="DIR")]
    """The new folder."""
    program: Annotated[Literal["original", "tensorflow", "huggingface", "nvidia"] | None, arg(name="from")] = None
    """The program that wrote SRC. original: the authors' PyTorch code; tensorflow: their TensorFlow code; huggingface:
    TransfoXL of transformers, or a folder exported by this program; nvidia: DeepLearningExamples."""
    to_format: Literal["huggingface", "original"] | None = None
    """huggingface: a folder for transformers >= 5; original: the authors' state dict. By default our own."""
    vocab: Annotated[str | None, arg(metavar="FILE|NAME")] = None
    """The vocabulary if SRC has none: cache.pt, cache.pkl, vocab.pkl, a list of words, or a prepared corpus."""

    def run(self, overrides: Sequence[str]) -> None:
        """Write a model to the new folder `--to`, in our format or in `--to-format`. After a mistake nothing is
        written."""
        from ..interop import read_model, write_original
        from ..run import save_checkpoint

        source, to, vocab = self.source, self.to, self.vocab
        if self.program is None and self.to_format is None:
            raise Mistake("Say which program wrote SRC by --from, or what to make of a run by --to-format.")
        if to.exists():
            raise FileExistsError(f"--to must be a new folder, and {to} exists. Choose another, or remove it.")
        if self.program is None:
            found = _own(source, vocab, overrides)
        else:
            tokens, notes = (None, []) if vocab is None else _vocab(vocab)
            found = read_model(source, self.program, overrides, vocab=tokens)
            found = replace(found, report=found.report + notes)
        loaded, report = found.build(), found.report
        if self.to_format == "huggingface":
            from ..interop.hf.export import export_huggingface

            export_huggingface(loaded, to)
        elif self.to_format == "original":
            report = report + write_original(loaded, to)
        else:
            save_checkpoint(to, model=loaded.model, vocab=loaded.vocab, config=loaded.config, report=report)
        weights = sum(parameter.numel() for parameter in loaded.model.parameters())
        print("\n".join([f"{to}: {weights:,} weights, {loaded.vocab}", *(f"  {line}" for line in report)]))


def _own(run: str, vocab: str | None, overrides: Sequence[str]) -> Imported:
    from ..interop import Imported, check_vocabulary, load_model

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
    from ..data.corpus import Corpus
    from ..data.datasets import store_folder
    from ..interop import read_vocabulary

    if Path(name).is_file():
        return read_vocabulary(Path(name))
    store = store_folder(name, "")
    if not (store / "corpus.json").is_file():
        raise FileNotFoundError(f"--vocab must be a file or the name of a prepared corpus, and there is no {name}.")
    return Corpus.open(store).vocab, []
