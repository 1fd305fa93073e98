"""`txl convert`: import checkpoints of other programs, and export ours to Hugging Face's format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from ..mistake import Mistake

if TYPE_CHECKING:
    from ..data.vocab import Vocab
    from ..run.checkpoint import LoadedModel


@dataclass(frozen=True)
class Convert:
    """Import checkpoints of other programs, and export ours.

    With --from, any setting that `txl train --help` lists can be given as --section.field value, and with --to-format
    onnx the lengths: --eval.tgt-len, --eval.mem-len, --eval.clamp-len, --eval.attn-len and --eval.context-len."""

    source: Annotated[Positional[str], arg(metavar="SRC")]
    """With --from, a checkpoint of another program; otherwise a run."""
    to: Annotated[Path, arg(metavar="DIR")]
    """The new folder."""
    program: Annotated[Literal["original", "tensorflow", "huggingface", "nvidia"] | None, arg(name="from")] = None
    """The program that wrote SRC. original: the authors' PyTorch code; tensorflow: their TensorFlow code; huggingface:
    TransfoXL of transformers, or a folder exported by this program; nvidia: DeepLearningExamples."""
    to_format: Literal["huggingface", "onnx"] | None = None
    """huggingface: a folder for transformers >= 5; onnx: a graph with memory for any number of rows. By default our own
    format."""
    int8: bool = False
    """With onnx: round the weights of products to 8 bits."""
    vocab: Annotated[str | None, arg(metavar="FILE|NAME")] = None
    """The vocabulary if SRC has none: cache.pt, cache.pkl, vocab.pkl, a list of words, the
    transformer_xl_vocab.json of an exported folder, or a prepared corpus."""

    def run(self, overrides: Sequence[str]) -> None:
        """Write a model to the new folder `--to`. After a mistake nothing is written."""
        from ..interop.hub import HUB, fetched
        from ..interop.reading import read_model
        from ..run.checkpoint import LoadedModel, save_checkpoint
        from ..runtime.files import remove_unfinished

        if self.to.exists():
            raise FileExistsError(f"--to must be a new folder, and {self.to} exists. Choose another, or remove it.")
        if self.int8 and self.to_format != "onnx":
            raise Mistake("--int8 is for --to-format onnx. Give it too, or leave --int8 out.")
        if self.program is None:
            loaded, report = self._own(overrides), []
        else:
            vocab = None if self.vocab is None else _vocab(self.vocab)
            source = fetched(self.source) if self.source.startswith(HUB) else self.source
            found = read_model(source, self.program, overrides, vocab=vocab)
            if found.vocab is None:
                raise Mistake(
                    "It holds no vocabulary: give --vocab, a cache.pt, cache.pkl or vocab.pkl, the "
                    "transformer_xl_vocab.json of an exported folder, a text with a token per line, or the name of a "
                    "corpus that `txl data` prepared as for its training."
                )
            loaded, report = LoadedModel(found.model, found.vocab, found.config), found.report
        if self.to_format is None:
            save_checkpoint(self.to, model=loaded.model, vocab=loaded.vocab, config=loaded.config, report=report)
        elif self.to_format == "onnx":
            from ..interop.onnx import export_onnx

            export_onnx(loaded, loaded.config.eval_lengths, self.to, int8=self.int8)
        else:
            from ..interop.hf.export import export_huggingface

            export_huggingface(loaded, self.to)
        remove_unfinished(self.to.parent, self.to.name)  # an export's that was killed
        weights = sum(parameter.numel() for parameter in loaded.model.parameters())
        print("\n".join([f"{self.to}: {weights:,} weights, {loaded.vocab}", *(f"  {line}" for line in report)]))

    def _own(self, overrides: Sequence[str]) -> LoadedModel:
        from ..config.recipe import changed_settings
        from ..config.settings import LENGTHS
        from ..interop.hub import local
        from ..run.checkpoint import load_model

        if self.to_format is None:
            raise Mistake("Say which program wrote SRC by --from, or what to make of a run by --to-format.")
        if self.vocab is not None or (overrides and self.to_format != "onnx"):
            raise Mistake("--vocab and settings are for checkpoints of other programs (--from). Leave them out.")
        loaded = load_model(local(self.source))
        config, changed = changed_settings(loaded.config, overrides)
        lengths = {f"eval.{name}" for name in ("context_len", *LENGTHS)}
        if others := [name for name in changed if name not in lengths]:
            raise Mistake(f"--to-format onnx takes only the lengths of eval, got {', '.join(others)}. Leave it out.")
        return loaded._replace(config=config)


def _vocab(name: str) -> Vocab:
    from ..data.corpus import Corpus
    from ..data.datasets import store_folder
    from ..interop.vocabulary import read_vocabulary

    if Path(name).is_file():
        return read_vocabulary(Path(name))
    store = store_folder(name)
    if not (store / "corpus.json").is_file():
        raise FileNotFoundError(f"--vocab must be a file or the name of a prepared corpus, got {name!r}.")
    return Corpus.open(store).vocab
