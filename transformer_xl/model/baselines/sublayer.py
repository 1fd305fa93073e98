"""The attention sublayer of Transformer-XL around the scores of another model."""

from __future__ import annotations

from typing import Any

from ..attention import RelativeMultiheadAttention


class Sublayer(RelativeMultiheadAttention):
    """There are no sinusoids of distances to project; a subclass says what it does in their place by `attend`."""

    def __init__(self, *sizes: int, **settings: Any):
        super().__init__(*sizes, **settings)
        self.position = None
