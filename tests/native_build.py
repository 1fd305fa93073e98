"""The kernels in C++ for tests: built once for each machine, in its folder of temporary files.

The process that hands out the tests also loads this file, and starts the others afterwards: it does not import torch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

HOME = Path(tempfile.gettempdir(), f"txl-native-{os.getuid()}")


@pytest.fixture
def without_build(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels are on, and none is loaded. `built` gives the folder that has them."""
    monkeypatch.delenv("TXL_NATIVE", raising=False)
    _forget()
    yield
    _forget()


@pytest.fixture
def built(without_build: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the built kernels. The test is skipped where they cannot be built."""
    import torch

    from transformer_xl.ops import native
    from transformer_xl.ops.choice import native_refusal

    if reason := native.machine_refusal():
        pytest.skip(f"the kernels do not run here: {reason}")
    monkeypatch.setenv("TXL_HOME", str(HOME))
    HOME.mkdir(exist_ok=True)
    lines: list[str] = []
    with FileLock(HOME / "lock"):
        native.build(lines.append)
    if (reason := native_refusal(torch.device("cpu"), torch.float32)) is not None:
        missing = "compiler" in "".join(lines)
        pytest.skip("no C++ compiler to build the kernels with") if missing else pytest.fail(f"{lines}: {reason}")
    return native.library()


def _forget() -> None:
    from transformer_xl.ops import native

    native.library.cache_clear()
    native._load.cache_clear()
