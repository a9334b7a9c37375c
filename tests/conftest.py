"""Shared fixtures, and the strictness that every test runs under."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest

# Read by jax when it is first imported; this file does not import it, so that host-side tests stay free of it.
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
# Many tests build an engine of their own over the same small model: its programs are compiled once a run, for all of
# its processes.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="turbojax-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

SHARED = Path(__file__).parents[2] / "shared"


def pytest_configure(config: pytest.Config) -> None:
    """Tests run on the CPU, whose float32 is exact, unless they were chosen with `-m gpu`."""
    expression = config.getoption("markexpr", "")
    if "gpu" not in expression or "not gpu" in expression:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that have slow tests come first: a long test that starts last leaves the other processes idle."""
    long_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long_files)


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Folder of small checkpoints with what transformers computed from them; `manifest.json` has the tolerances."""
    folder = SHARED / "goldens"
    if not folder.is_dir():
        pytest.skip(f"no golden checkpoints at {folder}: they are kept beside the repository")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's .gguf file, fetched into the user's cache when it is not there yet."""
    from turbojax.errors import TurbojaxError
    from turbojax.hub import default_model

    try:
        return default_model()
    except TurbojaxError as error:
        pytest.skip(f"the default model cannot be fetched: {error}")


@pytest.fixture(autouse=True)
def what_is_logged_is_of_the_test_alone():
    """Whatever sets the level of our loggers for a process (`compat.pipeline` does) sets it for its own test."""
    ours = logging.getLogger("turbojax")
    level = ours.level
    yield
    ours.setLevel(level)
