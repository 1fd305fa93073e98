"""Commands about recipes and machines: `txl recipes`, `txl env`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from .command import Command


@dataclass(frozen=True)
class Recipes(Command):
    """List the recipes: model, data, parameters, memory to train, results."""

    names: Annotated[
        Positional[tuple[str, ...]], arg(metavar="RECIPE ...", help="By default all packaged recipes.")
    ] = ()
    json: bool = False
    """Print one JSON object."""

    journey = "recipes.list_recipes"


@dataclass(frozen=True)
class Env(Command):
    """Print the hardware and versions of this machine, and what `auto` chooses on it, with reasons."""

    check: bool = False
    """First compare the fused kernels with float64 on the CUDA device, in one or two minutes. `auto` trains with them
    only on a card where they passed, with the same versions and source."""
    json: bool = False
    """Print one JSON object."""

    journey = "env.env"
