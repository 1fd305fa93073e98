"""The checker behind `--jaxtyping-packages`: beartype, with an int welcome wherever a float is, the integers of
`torch.export`, and every stream."""

from typing import TextIO

import torch
from beartype import BeartypeConf, FrozenDict, beartype

overrides = FrozenDict({int: int | torch.SymInt, TextIO: object})
check = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=overrides))
