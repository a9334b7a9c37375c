"""The search for the cheapest policy, on costs that are known; and a whole audit of a small model."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from turbojax.cli import app
from turbojax.kv_policy import KVPolicy, read_kv_policy
from turbojax.lite import audit_run
from turbojax.lite.audit import Measured
from turbojax.lite.audit_policy import descent, propose

PLACES = [(layer, side, bits) for layer in range(3) for side in (0, 1) for bits in (8, 4)]


def num_bytes(layers):
    return sum({16: 64, 8: 36, 4: 20}[bits] for pair in layers for bits in pair)


def added(costs, layers):
    """KL where places do not depend on each other."""
    return sum(
        costs[layer, side, bits] for layer, pair in enumerate(layers) for side, bits in enumerate(pair) if bits < 16
    )


@given(st.lists(st.floats(1e-6, 1), min_size=12, max_size=12), st.floats(0, 3))
def test_a_proposal_is_within_the_budget_and_one_more_step_is_not(values, budget):
    costs = dict(zip(PLACES, values, strict=True))
    costs |= {
        (layer, side, 4): costs[layer, side, 8] + costs[layer, side, 4] for layer, side, bits in PLACES if bits == 8
    }
    path = descent(costs, 3, num_bytes)
    assert path[0] == ((16, 16),) * 3
    assert path[-1] == ((4, 4),) * 3
    sizes = [num_bytes(layers) for layers in path]
    assert sizes == sorted(set(sizes), reverse=True)
    asked = []

    def measure(policy):
        asked.append(policy)
        return Measured(nll=1.0, kl=added(costs, policy.layers), top1=1.0)

    found = propose(path, budget, measure, hadamard=True)
    assert found.measured.kl <= budget
    at = path.index(found.policy.layers)
    assert at == len(path) - 1 or added(costs, path[at + 1]) > budget
    assert len(asked) <= 6
    assert found.policy.hadamard


def test_what_costs_nothing_goes_first():
    costs = dict.fromkeys(PLACES, 1.0) | {(1, 1, 8): 0.0, (1, 1, 4): 0.0}
    path = descent(costs, 3, num_bytes)
    assert ((16, 16), (16, 4), (16, 16)) in path[1:3]


@pytest.fixture
def run_cli(monkeypatch):
    monkeypatch.setattr(app, "prepare_environment", lambda: None)  # the environment is the whole test run's
    return lambda *args: CliRunner().invoke(app.app, [str(arg) for arg in args])


@pytest.fixture
def folder(goldens, tmp_path, monkeypatch):
    """A model of two layers, with a text that is token ids already."""
    ids = np.asarray(np.load(goldens / "llama_plain" / "inputs.npz")["p40_ids"], np.int32)
    monkeypatch.setattr(audit_run, "token_ids_of", lambda model, text: np.tile(ids, 2))
    return shutil.copytree(goldens / "llama_plain", tmp_path / "model", copy_function=shutil.copyfile)


def test_an_audit_shows_candidates_and_layers_and_writes_what_it_proposes(folder, tmp_path, run_cli):
    done = run_cli(
        "lite", "audit", folder, "--window-len", 40, "--w-group-size", 32, "--budget", 0.02,
        "--work-dir", tmp_path / "made", "--json", tmp_path / "audit.json", "--plot", tmp_path / "audit.png",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "audit.json").read_text())
    names = [row["name"] for row in found["rows"] if row["layer"] is None]
    assert names == [
        "float32", "K8 V8", "K8 V4", "K4 V8", "K4 V8 Hadamard", "K4 V4", "K4 V4 Hadamard", "W8 g32 RTN", "W4 g32 RTN",
    ]  # fmt: skip
    kl = {row["name"]: row["kl"] for row in found["rows"]}
    assert kl["float32"] < kl["K8 V8"] < kl["K4 V4"]
    assert kl["W8 g32 RTN"] < kl["W4 g32 RTN"]
    of_layers = [(row["layer"], row["name"]) for row in found["rows"] if row["layer"] is not None]
    kv_rows = [(layer, name) for layer in (0, 1) for name in ("K8", "K4", "V8", "V4")]
    assert of_layers == kv_rows + [(layer, name) for layer in (0, 1) for name in ("W8", "W4")]
    by_layer = {(row["layer"], row["name"]): row["kl"] for row in found["rows"]}
    assert all(kl["float32"] < by_layer[layer, "W8"] < by_layer[layer, "W4"] < kl["W4 g32 RTN"] for layer in (0, 1))
    assert "Against the same model in float32" in done.stdout
    assert found["proposal"]["kl"] <= 0.02
    policy = KVPolicy(tuple(map(tuple, found["proposal"]["kv_policy"])), hadamard=True)
    assert read_kv_policy(tmp_path / "made") == policy
    assert read_kv_policy(folder) is None
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_calibrate_writes_in_place_and_refuses_early(folder, tmp_path, run_cli):
    before = sorted(path.name for path in folder.iterdir())
    done = run_cli("lite", "calibrate", folder, "--window-len", 40, "--budget", 0, "--write")
    assert done.exit_code == 0, done.output
    assert read_kv_policy(folder) == KVPolicy(((16, 16), (16, 16)), hadamard=True)
    assert sorted(path.name for path in folder.iterdir()) == before
    refused = run_cli("lite", "calibrate", folder, "--work-dir", tmp_path)
    assert refused.exit_code == 1
    assert "exists" in refused.stderr
    for arguments in (["calibrate", folder], ["audit", folder, "--write"], ["audit", folder, "--w-bits", 3]):
        assert run_cli("lite", *arguments).exit_code == 2
