"""The checker behind `--jaxtyping-packages`: beartype, which takes an int as a float, a `SymInt` as an int, and
anything as a stream here. `Self` it knows only where it decorates the whole class."""

from typing import Self, TextIO

import torch
from beartype import BeartypeConf, FrozenDict, beartype

overrides = FrozenDict({int: int | torch.SymInt, TextIO: object, Self: object})
check = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=overrides))
