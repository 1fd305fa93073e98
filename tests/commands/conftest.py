"""The page of a run is made of fewer tokens here, which takes half as long; tests/report makes whole ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from transformer_xl.report import compute


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "READ", 40)
        patch.setattr(compute, "WRITTEN", 8)
        patch.setattr(compute, "TARGETS", 1_000)
        yield
