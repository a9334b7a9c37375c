"""Every dense family against transformers' recorded logits, log-probabilities and greedy continuations (float32)."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.core.harness import all_logits, chunks, decode, decode_batch, fresh, prefill
from turbojax.models.model import load_model

GOLDENS = Path(__file__).parents[3] / "shared" / "goldens"
pytestmark = pytest.mark.skipif(not GOLDENS.is_dir(), reason=f"golden checkpoints are not at {GOLDENS}")
PAGE_LEN = 16


def dense_cases():
    if not GOLDENS.is_dir():
        return []
    cases = json.loads((GOLDENS / "manifest.json").read_text())["cases"]
    return [c for c in cases if c["kind"] == "dense" and "moe" not in c["name"]]


def prompts_of(inputs, expected):
    """(name, ids, expected logits of the last 4 positions, logprobs, greedy ids) of every recorded prompt."""
    for p in ("p17", "p40"):
        yield p, inputs[f"{p}_ids"], expected[f"{p}_logits"], expected[f"{p}_logprobs"], expected[f"{p}_gen_ids"]
    for i, length in enumerate(inputs["batch_lens"]):
        logprobs = expected["batch_logprobs"][i, : length - 1]
        yield (
            f"batch {i}",
            inputs["batch_ids"][i, :length],
            expected["batch_logits"][i],
            logprobs,
            expected["batch_gen_ids"][i],
        )


@pytest.mark.parametrize("case", dense_cases(), ids=lambda c: c["name"])
def test_against_transformers(case):
    """All prompts of a case in one ragged batch: expected values are those of each prompt alone."""
    folder, tolerance = GOLDENS / case["name"], case["tolerance"]["float32_engine"]
    model = load_model(folder, dtype="float32")
    prompts = list(prompts_of(np.load(folder / "inputs.npz"), np.load(folder / "expected.npz")))
    state, sink = fresh(model.spec, num_slots=len(prompts), page_len=PAGE_LEN), len(prompts)
    batch = chunks(*((i, p[1], 0, True) for i, p in enumerate(prompts)), sink=sink)
    _, logits = all_logits(model.weights, state, batch, PAGE_LEN)
    logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    logits, start = np.asarray(logits), 0
    for name, ids, want_logits, want_logprobs, _ in prompts:
        rows = slice(start, start + len(ids))
        start += len(ids)
        np.testing.assert_allclose(logits[rows][-4:], want_logits, atol=tolerance["logits_atol"], rtol=0, err_msg=name)
        got = logprobs[rows][np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(got, want_logprobs, atol=tolerance["logprobs_atol"], rtol=0, err_msg=name)
    state, first = prefill(model.weights, state, batch)
    _, more = decode(model.weights, state, decode_batch(range(len(prompts)), sink), num_steps=15)
    tokens = np.concatenate([np.asarray(first)[None], np.asarray(more)]).T
    np.testing.assert_array_equal(tokens, np.stack([p[4] for p in prompts]))
