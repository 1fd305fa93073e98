"""The checker behind `--jaxtyping-packages`: beartype, for which an int is a float, a `SymInt` an int and
anything a stream."""

from typing import TextIO

import torch
from beartype import BeartypeConf, FrozenDict, beartype

overrides = FrozenDict({int: int | torch.SymInt, TextIO: object})
check = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=overrides))
