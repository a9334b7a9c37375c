"""Every dense family against transformers' recorded logits, log-probabilities and greedy continuations (float32)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.harness import all_logits, chunks, decode, decode_batch, fresh
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


# Attention of decode steps differs in these; llama_plain's are in tests/runner.
DECODED = ("mistral_sliding", "gemma2_softcap", "qwen3_qknorm")


@pytest.mark.parametrize("case", dense_cases(), ids=lambda c: c["name"])
def test_against_transformers(case):
    """All prompts of a case, with what was generated behind them, in one ragged batch.

    Expected values are those of each prompt alone. Each greedy id is the likeliest behind those recorded before it.
    """
    folder, tolerance = GOLDENS / case["name"], case["tolerance"]["float32_engine"]
    model = load_model(folder, dtype="float32")
    prompts = list(prompts_of(np.load(folder / "inputs.npz"), np.load(folder / "expected.npz")))
    state, sink = fresh(model.spec, num_slots=len(prompts), page_len=PAGE_LEN), len(prompts)
    all_ids = [np.concatenate([ids, new[:-1]]) for _, ids, _, _, new in prompts]
    batch = chunks(*((i, ids, 0, True) for i, ids in enumerate(all_ids)), sink=sink)
    state, logits = all_logits(model.weights, state, batch, PAGE_LEN)
    logprobs, start = np.asarray(jax.nn.log_softmax(logits, axis=-1)), 0
    logits = np.asarray(logits)
    for (name, ids, want_logits, want_logprobs, new), known in zip(prompts, all_ids, strict=True):
        rows, end = slice(start, start + len(known)), len(ids)
        start += len(known)
        got = logits[rows]
        np.testing.assert_allclose(got[end - 4 : end], want_logits, atol=tolerance["logits_atol"], rtol=0, err_msg=name)
        likely = logprobs[rows][np.arange(end - 1), ids[1:]]
        np.testing.assert_allclose(likely, want_logprobs, atol=tolerance["logprobs_atol"], rtol=0, err_msg=name)
        np.testing.assert_array_equal(got[end - 1 :].argmax(-1), new, err_msg=name)
    if case["name"] in DECODED:
        assert_decodes(model, state, prompts)


def assert_decodes(model, state, prompts):
    """From the first recorded token on, in steps of one token that write over the keys and values in the pool."""
    count, pad = len(prompts), state.slots.length.shape[0] - len(prompts)
    column = lambda values: jnp.asarray(np.pad(values, (0, pad)), jnp.int32)
    slots = state.slots.replace(
        last_token=column([p[4][0] for p in prompts]),
        length=column([len(p[1]) + 1 for p in prompts]),
        active=jnp.arange(count + pad) < count,
    )
    later = len(prompts[0][4]) - 1
    _, tokens = decode(model.weights, state.replace(slots=slots), decode_batch(range(count), count), num_steps=later)
    np.testing.assert_array_equal(np.asarray(tokens).T, np.stack([p[4][1:] for p in prompts]))
