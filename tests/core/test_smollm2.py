"""The real default model against transformers' recorded outputs: log-probabilities, continuations, perplexities."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.harness import chunks, fresh, generate_together, score
from turbojax.models.model import load_model
from turbojax.tokenizer import load_tokenizer

SHARED = Path(__file__).parents[3] / "shared"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SHARED / "smollm2").is_dir(), reason=f"the recorded outputs are not at {SHARED}/smollm2"),
]
LOGPROB_ATOL = 2e-3
SIZES = (128, 704, 3200)


@pytest.fixture(scope="module")
def expected():
    return json.loads((SHARED / "smollm2" / "expected.json").read_text())


def size_for(num_tokens):
    """One of three compiled sizes."""
    return next(size for size in SIZES if num_tokens <= size)


def target_logprobs(model, ids):
    """Log-probability of every token after the first, given those before it."""
    size = size_for(len(ids))
    state = fresh(model.spec, num_slots=1, page_len=64, max_len=3200)
    targets = np.zeros(size, np.int32)
    targets[: len(ids) - 1] = ids[1:]
    _, logprobs = score(model.weights, state, chunks((0, ids, 0, True), sink=1, size=size), jnp.asarray(targets))
    return np.asarray(logprobs)[: len(ids) - 1]


@pytest.mark.parametrize("size", [*SIZES[:-1], pytest.param(SIZES[-1], marks=pytest.mark.long)])
def test_prompt_and_continuation_logprobs(smol, expected, size):
    """Teacher-forced: prompt and recorded continuation in one pass."""
    of_size = [p for p in expected["prompts"] if size_for(len(p["input_ids"]) + len(p["greedy"]["ids"])) == size]
    assert of_size
    for prompt in of_size:
        ids, greedy = prompt["input_ids"], prompt["greedy"]
        got = target_logprobs(smol, ids + greedy["ids"])
        want = np.array([*prompt["prompt_logprobs"][1:], *greedy["logprobs"]], np.float64)
        np.testing.assert_allclose(got, want, atol=LOGPROB_ATOL, rtol=0, err_msg=prompt["id"])


@pytest.mark.long
def test_greedy_continuations_up_to_near_ties(smol, expected):
    """The short prompts decode together, each in a slot of its own; a longer one alone.

    The longest takes half a minute a pass: what was generated behind it is among the log-probabilities above.
    """
    by_size = {size: [p for p in expected["prompts"] if size_for(len(p["input_ids"])) == size] for size in SIZES[:-1]}
    assert all(by_size.values())
    for together in by_size.values():
        all_ids = [prompt["input_ids"] for prompt in together]
        size = size_for(max(map(len, all_ids)))
        state = fresh(smol.spec, num_slots=len(together), page_len=64, max_len=size + 64)
        _, tokens = generate_together(smol.weights, state, all_ids, len(together[0]["greedy"]["ids"]), size=size)
        for prompt, ids in zip(together, tokens, strict=True):
            compared = len(ids) if prompt["greedy"]["near_tie"] is None else prompt["greedy"]["near_tie"]
            assert ids[:compared] == prompt["greedy"]["ids"][:compared], prompt["id"]


@pytest.fixture(scope="module")
def windows(smollm2, expected):
    """The protocol's windows, [8, 1024]."""
    protocol = expected["perplexity"]
    ids = load_tokenizer(smollm2).encode((SHARED / "text" / "evaluation.txt").read_text(), add_special_tokens=False)
    assert len(ids) == protocol["file_tokens"]
    assert ids[: len(protocol["ids_first"])] == protocol["ids_first"]
    return np.asarray(ids[: protocol["tokens"]], np.int32).reshape(-1, protocol["window"])


@pytest.mark.parametrize(
    ("kv_bits", "name", "tolerance"),
    [
        ((16, 16), "float32", 0.003),
        ((8, 8), "kv8", 0.003),
        ((4, 4), "kv4", 0.02),
        ((8, 4), "k8_v4", 0.02),
        ((4, 8), "k4_v8", 0.02),
    ],
)
def test_perplexity_at_every_kv_precision(smollm2, windows, expected, kv_bits, name, tolerance):
    """Over the first window of the protocol, whose loss is recorded; docs/accuracy.md has all eight."""
    model, window = load_model(smollm2, dtype="float32", kv_bits=kv_bits), windows[0]
    state = fresh(model.spec, num_slots=1, page_len=64, max_len=1024)
    targets = jnp.asarray(np.append(window[1:], 0), jnp.int32)
    _, got = score(model.weights, state, chunks((0, window, 0, True), sink=1), targets)
    loss = -np.asarray(got)[:-1].mean(dtype=np.float64)
    recorded = expected["perplexity"]["results"][name]["window_nll"][0]
    assert np.exp(loss) == pytest.approx(np.exp(recorded), rel=tolerance)
