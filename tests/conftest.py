"""A thread for each worker: models here are tiny, and the threads of several workers would wait for each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from amount import examples
from hypothesis import HealthCheck, settings

pytest_plugins = ["native_build"]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TXL_NATIVE", "0")  # no command compiles; tests/ops/test_native.py switches it on
settings.register_profile(
    "ours", max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("ours")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("jaxtyping_packages"):
        for item in items:
            if item.get_closest_marker("unchecked"):
                item.add_marker(pytest.mark.skip(reason="it is for the package without checks of types"))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TXL_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def guard() -> None:
    """What computes for a CUDA device that is not there; without it, tests that need it are skipped."""
    from benchmarks import launches
    from transformer_xl.mistake import Mistake

    try:
        launches.add_guard()
    except Mistake as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def smallest_numbers() -> Iterator[None]:
    """A command lets the smallest numbers become 0, in the process of the tests, too."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
