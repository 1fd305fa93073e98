"""The checker behind `--jaxtyping-packages`: beartype, with an int welcome wherever a float is."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
