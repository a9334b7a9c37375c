"""Real processes on loopback, JAX's own collectives between them: two answer as one, and end when one is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import TOKEN, free_port
from tests.distributed.worker import GREEDY, PROMPTS
from tests.serve.harness import SMALL, write_model
from tests.sharding.harness import write_native
from turbojax.api import pipeline
from turbojax.configs import EngineConfig
from turbojax.distributed.places import TOKEN_VARIABLE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("processes") / "tiny")


def start(folder, options):
    command = [sys.executable, "-m", "tests.distributed.worker", str(folder), json.dumps(options)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start_all(folder, num, of_the_last=None, **told):
    """The processes of a job. `of_the_last` are fields of its last process's config, `told` what else it is told."""
    address, found = f"127.0.0.1:{free_port()}", []
    for number in range(num):
        cluster = {"coordinator_address": address, "num_processes": num, "process_id": number, "token": TOKEN}
        is_last = number == num - 1
        engine = SMALL | {"tp": num} | (of_the_last or {} if is_last else {})
        found.append(start(folder, {"engine": engine, "cluster": cluster} | (told if is_last else {})))
    return found


def ends(processes):
    """Output, errors and exit status of each; none is left behind."""
    try:
        return [(*process.communicate(timeout=TIMEOUT_S), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def answers(folder):
    """What one process on one device answers."""
    with pipeline(folder, EngineConfig(**SMALL)) as pipe:
        return [response.token_ids for response in pipe(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def alone(folder):
    return answers(folder)


def test_two_processes_answer_as_one(folder, alone):
    (out, err, status), (_, other_err, other_status) = ends(start_all(folder, 2))
    assert (status, other_status) == (0, 0), err + other_err
    found = json.loads(out.splitlines()[-1])
    assert found["errors"] == [None] * len(alone)
    assert found["token_ids"] == alone


def test_processes_restore_their_slices_of_a_native_checkpoint(tmp_path):
    write_native(tmp_path / "native", "w4-awq")
    (out, err, status), (_, other_err, other_status) = ends(start_all(tmp_path / "native", 2))
    assert (status, other_status) == (0, 0), err + other_err
    assert json.loads(out.splitlines()[-1])["token_ids"] == answers(tmp_path / "native")


def test_a_process_that_is_killed_ends_the_job_with_its_name(folder):
    (out, err, _), _ = ends(start_all(folder, 2, dies_at=4))
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert all("process 1 of 2 (127.0.0.1) is lost" in error for error in found["errors"]), err


def test_processes_of_different_configs_do_not_start(folder):
    """The error comes from the processes' first words, before any of them has started JAX."""
    for _, err, status in ends(start_all(folder, 2, {"quant_policy": 8})):
        assert status != 0
        assert "EngineConfig.quant_policy: process 1 of 2 (127.0.0.1) has 8, process 0 has None" in err


def test_the_same_command_on_all_processes_answers_once(folder):
    address = f"127.0.0.1:{free_port()}"
    command = [
        sys.executable, "-m", "turbojax", "generate", "Hi", "--model", str(folder), "--max-new-tokens", "8",
        "--tp", "2", "--dtype", "float32", "--max-batch-size", "1", "--session-len", "64", "--num-processes", "2",
        "--coordinator-address", address,
    ]  # fmt: skip
    processes = [
        subprocess.Popen(
            [*command, "--process-id", str(number)], cwd=ROOT, env=os.environ | {TOKEN_VARIABLE: TOKEN}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for number in range(2)
    ]  # fmt: skip
    (_, err, status), (other_out, other_err, other_status) = ends(processes)
    assert (status, other_status) == (0, 0), err + other_err
    assert "8 tokens" in err
    assert [line for line in other_out.splitlines() if not line.startswith("[Gloo]")] == []
