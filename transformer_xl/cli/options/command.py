"""What all commands share: the function that does the work, and the types of their options."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import Positional, arg

RunFolder = Annotated[
    Positional[Path],
    arg(metavar="RUN", help="A run folder, one of its checkpoints, or hf:NAME for a model on the Hugging Face hub."),
]
Precision = Literal["auto", "fp32", "bf16"]
Part = Literal["train", "valid", "test", "all"]
Text = Annotated[str | None, arg(metavar="PATH")]
Sizes = Annotated[tuple[int, ...], arg(metavar="N ...")]
SizesOrNone = Annotated[tuple[int | None, ...], arg(metavar="N|none ...")]
"""`none` may be in upper or lower case, as in a recipe's settings."""
Size = Annotated[int | None, arg(metavar="N")]
Folder = Annotated[Path | None, arg(metavar="DIR")]


class Command:
    """A command whose fields are its options."""

    journey: ClassVar[str]
    """MODULE.FUNCTION in `journeys`, which does the work. `run` imports it late, because it needs torch."""

    def run(self) -> int:
        """Do the work, and return the exit status."""
        module, function = self.journey.split(".")
        getattr(import_module(f"..journeys.{module}", __package__), function)(self)
        return 0
