"""Windows of a text: their log-probabilities against recorded ones, whole and in chunks; how a text is cut."""

import math

import numpy as np
import pytest

from turbojax.errors import LiteError
from turbojax.lite import evaluate
from turbojax.lite.evaluate import cut_windows, perplexity_of, window_logprobs
from turbojax.models.model import load_model


@pytest.fixture(scope="module")
def recorded(goldens):
    """A model, a prompt of 40 tokens, and transformers' log-probabilities of the 39 behind the first."""
    folder = goldens / "llama_plain"
    ids, logprobs = np.load(folder / "inputs.npz")["p40_ids"], np.load(folder / "expected.npz")["p40_logprobs"]
    return load_model(folder, dtype="float32"), np.asarray(ids, np.int32), logprobs


@pytest.mark.parametrize("chunk_len", [1024, 16])
def test_log_probabilities_are_transformers(recorded, chunk_len, monkeypatch):
    model, ids, logprobs = recorded
    monkeypatch.setattr(evaluate, "PAGE_LEN", 16)
    monkeypatch.setattr(evaluate, "CHUNK_LEN", chunk_len)
    # A second window in the same state: what the first left in the pool is not seen.
    other = (ids + 1) % model.spec.vocab_size
    first, again = window_logprobs(model.weights, np.stack([other, ids]))
    np.testing.assert_allclose(again, logprobs, atol=1e-3, rtol=0)
    assert not np.allclose(first, logprobs, atol=0.1)


def test_perplexity_is_the_mean_over_all_scored_tokens(recorded):
    model, ids, logprobs = recorded
    ticks = []
    found = perplexity_of(model.weights, np.stack([ids, ids]), lambda: ticks.append(1))
    assert found.perplexity == pytest.approx(math.exp(-np.mean(logprobs, dtype=np.float64)), rel=1e-4)
    assert found.num_scored_tokens == 2 * 39
    assert len(ticks) == 2


def test_windows_follow_each_other_and_drop_the_rest():
    ids = np.arange(10)
    assert cut_windows(ids, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut_windows(ids, 3, num_windows=2).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert cut_windows(ids, 99).tolist() == [ids.tolist()]
    with pytest.raises(LiteError, match="1 tokens"):
        cut_windows(ids[:1], 4)
