"""The checker behind `--jaxtyping-packages`: beartype. An int is also a float; `torch.export` has integers of its own;
any object is a stream."""

from typing import TextIO

import torch
from beartype import BeartypeConf, FrozenDict, beartype

overrides = FrozenDict({int: int | torch.SymInt, TextIO: object})
check = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=overrides))
