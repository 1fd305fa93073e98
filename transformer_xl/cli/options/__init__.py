"""Every command of `txl` as a dataclass. Its fields are its options; its `run` imports the code that does the work."""

from __future__ import annotations

from .analyse import Analyse, Report
from .measure import Env, Recipes
from .train import Data, Demo, Train
from .use import Convert, Eval, Generate, Harness, Score, Serve

_USE = Eval, Score, Harness, Generate, Serve
COMMANDS = {
    command.__name__.lower(): command for command in (Demo, Data, Recipes, Train, *_USE, Analyse, Report, Convert, Env)
}
