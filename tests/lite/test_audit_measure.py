"""What an audit measures, against float64 numpy on the engine's own logits at each precision."""

import numpy as np
import pytest

from tests.core.harness import all_logits, chunks, fresh, generate
from turbojax.kv_policy import KVPolicy
from turbojax.lite.audit import Audit, at_layer, kv_bytes_per_token, uniform
from turbojax.models.model import load_model

PAGE_LEN = 64


@pytest.fixture(scope="module")
def folder(goldens):
    return goldens / "llama_plain"


@pytest.fixture(scope="module")
def windows(folder):
    """Two windows of 40 tokens."""
    ids = np.asarray(np.load(folder / "inputs.npz")["p40_ids"], np.int32)
    return np.stack([ids, ids[::-1]])


@pytest.fixture(scope="module")
def audit(folder, windows):
    return Audit(load_model(folder, dtype="float32").weights, windows)


def logprobs_of(folder, ids, policy=None):
    """float64 [T, V], of the engine with static bits in its spec."""
    options = {} if policy is None else {"kv_bits": lambda i: policy.layers[i], "kv_hadamard": policy.hadamard}
    model = load_model(folder, dtype="float32", **options)
    state = fresh(model.spec, num_slots=1, page_len=PAGE_LEN)
    _, logits = all_logits(model.weights, state, chunks((0, ids, 0, True), sink=1), PAGE_LEN)
    logits = np.asarray(logits, np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    "policy",
    [KVPolicy(((4, 4), (4, 4))), KVPolicy(((16, 8), (4, 16)), hadamard=True)],
    ids=str,
)
def test_measures_are_those_of_the_engine_at_that_precision(audit, folder, windows, policy):
    nll, kl, top1 = [], [], []
    for window in windows:
        want, got = (logprobs_of(folder, window, p)[:-1] for p in (None, policy))
        nll += (-got[np.arange(len(got)), window[1:]]).tolist()
        kl += (np.exp(want) * (want - got)).sum(-1).tolist()
        top1 += (want.argmax(-1) == got.argmax(-1)).tolist()
    found = audit.measure(policy)
    assert found.nll == pytest.approx(np.mean(nll), abs=2e-4)
    assert found.kl == pytest.approx(np.mean(kl), rel=0.02)
    assert found.top1 == pytest.approx(np.mean(top1), abs=0.03)  # near ties


def test_sixteen_bits_are_the_oracle(audit, folder, windows):
    found = audit.measure(uniform(audit.spec, 16, 16), greedy=True)
    assert found.kl == pytest.approx(0, abs=1e-9)
    assert (found.top1, found.first_divergence) == (1.0, None)
    assert found.num_greedy == 20
    losses = [-logprobs_of(folder, w)[np.arange(39), w[1:]].mean() for w in windows]
    assert found.nll == pytest.approx(np.mean(losses), abs=1e-4)


def test_the_first_divergence_is_where_two_greedy_runs_part(audit, folder, windows):
    policy = uniform(audit.spec, 4, 4)
    oracle, candidate = (load_model(folder, dtype="float32", **o) for o in ({}, {"kv_bits": (4, 4)}))
    runs = [
        generate(m.weights, fresh(m.spec, num_slots=1, page_len=PAGE_LEN), windows[0][:20], 20)[1]
        for m in (oracle, candidate)
    ]
    parted = next((i for i, (a, b) in enumerate(zip(*runs, strict=True)) if a != b), None)
    assert audit.measure(policy, greedy=True).first_divergence == parted


def test_one_layer_costs_less_than_all(audit):
    kls = [audit.measure(at_layer(audit.spec, layer, 4, 4), num_windows=1).kl for layer in range(2)]
    assert 0 < max(kls) < audit.measure(uniform(audit.spec, 4, 4), num_windows=1).kl * 1.5


def test_bytes_of_a_token(audit):
    """2 kv heads of 32 dims: 64 bytes at 16 bits, 36 at 8, 20 at 4, for K and for V."""
    assert kv_bytes_per_token(audit.spec, KVPolicy(((16, 16), (8, 4)))) == 2 * (64 + 64) + 2 * (36 + 20)
