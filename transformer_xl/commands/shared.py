"""The options that several commands have, and how numbers are read: as the settings are, with the same errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_origin

from tyro.conf import Positional, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from ..config.settings import Part, Precision
from ..config.values import alternatives, fits, from_words, type_text, value_text
from ..mistake import Mistake

if TYPE_CHECKING:
    from ..config.problems import Problems
    from ..data.corpus import Split
    from ..data.vocab import Vocab
    from ..run.trained import TrainedRun

RunFolder = Annotated[
    Positional[Path],
    arg(metavar="RUN", help="A run folder, one of its checkpoints, or hf:NAME for a model on the Hugging Face hub."),
]
TextPath = Annotated[str | None, arg(metavar="PATH")]
Sizes = Annotated[tuple[int, ...], arg(metavar="N ...")]
SizesOrNone = Annotated[tuple[int | None, ...], arg(metavar="N|none ...")]
"""`none` may be in upper or lower case, as in a recipe's settings."""
Size = Annotated[int | None, arg(metavar="N")]
Folder = Annotated[Path | None, arg(metavar="DIR")]
Runs = Annotated[
    Positional[tuple[Path, ...]], arg(metavar="RUN ...", help="Run folders, or hf:NAME; all with the same vocabulary.")
]


def open_run(folder: Path, device: str, precision: Precision) -> TrainedRun:
    """The run that a command names, which may be on the hub."""
    from ..interop.hub import local
    from ..run.trained import TrainedRun

    return TrainedRun(local(folder), device, precision)


def check_folder(out: Path | None, problems: Problems) -> None:
    """Add a problem if a folder to write cannot be one, before any work."""
    if out is not None and any(each.exists() and not each.is_dir() for each in (out, *out.parents)):
        problems.append(f"--out must be a folder, and {out} is a file, or below one. Name another.")


class Comparison(NamedTuple):
    """Runs with the same vocabulary, and the text on which they are compared."""

    runs: Sequence[TrainedRun]
    names: Sequence[str]
    vocab: Vocab
    split: Split
    unit: str
    """The unit of the results: ppl or bpc."""

    def facts(self, of_runs: Iterable[Mapping[str, object]]) -> dict[str, object]:
        """The JSON entries about the text and each run, with the results of each run."""
        runs = [
            {"run": str(each.path), "name": name, "kind": each.config.model.kind, **figures}
            for each, name, figures in zip(self.runs, self.names, of_runs, strict=True)
        ]
        return {**self.split.about, "precision": self.runs[0].precision, "runs": runs}


@dataclass(frozen=True)
class ComparisonOptions:
    """The options of the commands that compare runs."""

    runs: Runs
    data: TextPath = None
    """Score this text instead of the first run's corpus."""
    split: Part | None = None
    """The split to score. By default test, or all if --data has no splits. all: every split, one after another."""
    device: str = "auto"
    out: Folder = None
    """The folder for JSON, arrays and pictures; by default one in the first run."""
    json: bool = False

    def compared(self, precision: Precision, problems: Problems) -> Comparison:
        """Open the runs, and the text on which they are compared. If there are `problems`, raise `Mistake` before."""
        from ..evaluation.score import figure
        from ..run.checkpoint import load_vocab
        from ..run.folder import find_checkpoint, short_names

        check_folder(self.out, problems)
        if not self.runs:
            problems.append("RUN must be at least one run, got none.")
        problems.refuse()
        runs = [open_run(run, self.device, precision) for run in self.runs]
        for each in runs:
            each.problems.refuse()
        [vocab, *others] = [load_vocab(find_checkpoint(each.path)) for each in runs]
        for each, other in zip(runs[1:], others, strict=True):
            if other != vocab:
                problems.append(
                    f"All runs must have the same vocabulary, because they are compared target by target; {each.path} "
                    f"has {other}, and {runs[0].path} {vocab}. Leave one of them out."
                )
        problems.refuse()
        split = runs[0].text(vocab, self.data, self.split, "test")
        return Comparison(runs, short_names([run.path for run in runs]), vocab, split, figure(vocab.unit, 0.0)[0])


REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def number(option: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """The rule for an option of one number or of a list of numbers. The command checks the bounds."""
    many = get_origin(option.type) is tuple and Ellipsis in get_args(option.type)
    each: Any = get_args(option.type)[0] if many else option.type
    kind = next((kind for kind in (int, float) if kind in alternatives(each)), None)
    if kind is None:
        return None
    hint: Any = option.type if many else kind  # None is only a default: it cannot be typed

    def read(words: list[str]) -> Any:
        value = from_words(words, hint)
        values = value if many else [value]
        if not values or any(isinstance(one, str) for one in values):
            raise Mistake(f"it must be {type_text(hint)}, got {value_text(value)}")
        return tuple(values) if many else value

    return PrimitiveConstructorSpec(
        nargs="*" if many else 1,
        metavar="FLOAT" if kind is float else "INT",
        instance_from_str=read,
        is_instance=lambda value: fits(value, option.type),
        str_from_instance=lambda value: [*map(str, value)] if many else [str(value)],
    )
