"""One tiny model, its pipeline and its server for all tests of a run."""

from __future__ import annotations

import httpx
import pytest

from tests.pipeline.harness import wait_until_idle
from tests.serve import harness


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A checkpoint with random weights, a byte tokenizer and a chat template."""
    return harness.write_model(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="session")
def tiny_pipe(tiny_folder):
    with harness.open_tiny(tiny_folder) as pipe:
        yield pipe
        assert wait_until_idle(pipe), "something leaked"


@pytest.fixture(scope="session")
def tiny_url(tiny_pipe):
    """Base url (without /v1) of a server on the tiny model; it knows it as "tiny"."""
    with harness.serving_pipe(tiny_pipe) as url:
        yield url


@pytest.fixture
def fake_pipe():
    with harness.fake_pipeline() as pipe:
        yield pipe
        assert wait_until_idle(pipe), "something leaked"


@pytest.fixture
def fake_url(fake_pipe):
    """Base url of a server on an engine without a device."""
    with harness.serving_pipe(fake_pipe) as url:
        yield url


@pytest.fixture
def tiny(tiny_url):
    """A client of the server on the tiny model."""
    with httpx.Client(base_url=tiny_url, timeout=60) as client:
        yield client


@pytest.fixture
def fake(fake_url):
    """A client of the server on an engine without a device."""
    with httpx.Client(base_url=fake_url, timeout=60) as client:
        yield client
