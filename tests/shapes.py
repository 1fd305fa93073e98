"""The checker behind `--jaxtyping-packages`: beartype, which takes an int as a float, a `SymInt` as an int, and
anything as a stream here."""

from typing import TextIO

import torch
from beartype import BeartypeConf, FrozenDict, beartype

overrides = FrozenDict({int: int | torch.SymInt, TextIO: object})
check = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=overrides))
