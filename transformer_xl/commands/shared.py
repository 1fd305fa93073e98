"""The options that several commands have, and how numbers are read: as the settings are, with the same errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from tyro.conf import Positional, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from ..config.values import alternatives, fits, from_words, type_text, value_text
from ..mistake import Mistake

if TYPE_CHECKING:
    from ..analysis.comparison import Comparison
    from ..config.problems import Problems

RunFolder = Annotated[
    Positional[Path],
    arg(metavar="RUN", help="A run folder, one of its checkpoints, or hf:NAME for a model on the Hugging Face hub."),
]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Part = Literal["train", "valid", "test", "all"]
TextPath = Annotated[str | None, arg(metavar="PATH")]
Sizes = Annotated[tuple[int, ...], arg(metavar="N ...")]
SizesOrNone = Annotated[tuple[int | None, ...], arg(metavar="N|none ...")]
"""`none` may be in upper or lower case, as in a recipe's settings."""
Size = Annotated[int | None, arg(metavar="N")]
Folder = Annotated[Path | None, arg(metavar="DIR")]
Runs = Annotated[
    Positional[tuple[Path, ...]], arg(metavar="RUN ...", help="Run folders, or hf:NAME; all with the same vocabulary.")
]


def check_folder(out: Path | None, problems: Problems) -> None:
    """Add a problem if a folder to write cannot be one, before any work."""
    if out is not None and any(each.exists() and not each.is_dir() for each in (out, *out.parents)):
        problems.append(f"--out must be a folder, and {out} is a file, or below one. Name another.")


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
        """The runs and the text that they are compared on."""
        from ..analysis.comparison import Comparison
        from ..interop.hub import local

        check_folder(self.out, problems)
        runs, where = list(map(local, self.runs)), self.device
        return Comparison(runs, problems, data=self.data, split=self.split, device=where, precision=precision)

    def folder(self, group: Comparison, name: str) -> Path:
        """The folder for the files, which is `name` in the first run if the user gave none."""
        return self.out or group.runs[0].path / name


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
