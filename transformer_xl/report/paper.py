"""The test figures of the Transformer-XL paper (Dai et al., ACL 2019, Tables 1-5), to compare with a run's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

SHAPE = ("n_layer", "n_head", "d_head", "d_model", "d_inner")


class Published(NamedTuple):
    """A row of the paper."""

    name: str
    parameters: str
    """As the paper rounds them."""
    unit: str
    test: str
    where: str
    shapes: tuple[tuple[int, ...], ...] = ()
    """`SHAPE` of the models it may mean, from the authors' scripts, which have none of 18 layers on enwik8."""


_LARGE = (24, 8, 128, 1024, 3072)
TABLES = {
    "wikitext-103": (
        Published("standard", "151M", "ppl", "24.0", "Table 1", ((16, 10, 41, 410, 2100),)),
        Published("large", "257M", "ppl", "18.3", "Table 1", ((18, 16, 64, 1024, 4096), (16, 16, 64, 1024, 4096))),
    ),
    "enwik8": (
        Published("12 layers", "41M", "bpc", "1.06", "Table 2", ((12, 8, 64, 512, 2048),)),
        Published("18 layers", "88M", "bpc", "1.03", "Table 2"),
        Published("24 layers", "277M", "bpc", "0.99", "Table 2", (_LARGE,)),
    ),
    "text8": (Published("24 layers", "277M", "bpc", "1.08", "Table 3", (_LARGE,)),),
    "lm1b": (
        Published("base", "0.46B", "ppl", "23.5", "Table 4", ((20, 8, 128, 1024, 6144),)),
        Published("large", "0.8B", "ppl", "21.8", "Table 4", ((24, 16, 80, 1280, 8192),)),
    ),
    "ptb": (Published("16 layers", "24M", "ppl", "54.52", "Table 5", ((16, 10, 38, 380, 900),)),),
}
PROTOCOL = {"enwik8": "drop", "lm1b": "sentence"}
"""How the paper treats line ends, unless it keeps them."""


def corpus_name(config: Mapping[str, Any]) -> str:
    """The published corpus that a run's settings name, whole or partial."""
    return str(config.get("corpus", {}).get("name", "")).removesuffix("-partial").partition("+")[0]


def of_shape(config: Mapping[str, Any]) -> Published | None:
    """The paper's model of the run's corpus and shape, if there is one."""
    model = config.get("model", {})
    shape = tuple(model.get(name) for name in SHAPE)
    if model.get("kind", "transformer-xl") != "transformer-xl":
        return None
    return next((row for row in TABLES.get(corpus_name(config), ()) if shape in row.shapes), None)


def differences(config: Mapping[str, Any], partial: str) -> list[str]:
    """Why a run's test figure and the paper's do not measure the same text."""
    corpus, name = config.get("corpus", {}), corpus_name(config)
    found = [f"its corpus is partial ({partial})"] if partial else []
    if corpus.get("newlines", "keep") != PROTOCOL.get(name, "keep"):
        found.append(f'it reads line ends as "{corpus.get("newlines")}", the paper as "{PROTOCOL.get(name, "keep")}"')
    if most := config.get("eval", {}).get("max_tokens"):
        found.append(f"it scored the first {most:,} tokens only")
    if (split := config.get("eval", {}).get("split", "test")) != "test":
        found.append(f"it scored the {split} split")
    return found
