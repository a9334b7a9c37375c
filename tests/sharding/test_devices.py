"""The cases that need several devices, each file in a process of its own with eight simulated ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT, CASES = Path(__file__).parents[2], Path(__file__).parent / "cases"
FLAGS = "--xla_force_host_platform_device_count=8"


def run_cases(name, expression):
    """Runs a file of cases; a test that is chosen by the caller's own `-m` is chosen there, too."""
    env = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", expression]
    done = subprocess.run(
        [*command, str(CASES / f"{name}.py")], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["engine", "equality", "loading"])
def test_on_eight_devices(name):
    run_cases(name, "not slow and not gpu")


@pytest.mark.long
@pytest.mark.parametrize("name", ["equality", "engine"])
def test_on_eight_devices_at_length(name):
    run_cases(name, "slow and not gpu")


def test_every_file_of_cases_is_run():
    assert {path.stem for path in CASES.glob("*.py")} == {"equality", "loading", "engine"}
