"""The command line with a pipeline that needs no model."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from tests.cli.fake import FakePipeline, opener
from turbojax.cli import app, session


@pytest.fixture
def pipes(monkeypatch: pytest.MonkeyPatch) -> list[FakePipeline]:
    """The pipelines that the command opened."""
    opened: list[FakePipeline] = []
    monkeypatch.setattr(session, "open_pipeline", opener(opened))
    return opened


@pytest.fixture
def run(pipes: list[FakePipeline], monkeypatch: pytest.MonkeyPatch):
    """Runs the command line in this process: run("generate", "a prompt", input=...) -> Result."""
    monkeypatch.setattr(app, "prepare_environment", lambda: None)  # the environment is the whole test run's

    def invoke(*args: object, input: str | None = None) -> Result:
        return CliRunner().invoke(app.app, [str(arg) for arg in args], input=input)

    return invoke


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """Whatever started the tests: what a shell runs in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
