"""What requests ask for beside tokens, through the whole engine, against transformers' recorded outputs."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.runner.harness import open_pipe
from turbojax.configs import GenerationConfig, LogitsProcessor
from turbojax.engine.bad_words import BadWords, Vocabulary

pytestmark = pytest.mark.slow
EXTRAS = {"logprobs": 2, "prompt_logprobs": 1, "output_logits": "all", "output_last_hidden_state": "generation"}


@pytest.fixture(scope="module")
def pipe(model):
    processors = {"steer": LogitsProcessor(lambda logits, times, in_prompt, a, row: logits + a * row, ((), (256,)))}
    pipe, parts = open_pipe(model, dtype="float32", num_decode_steps=1, logits_processors=processors)
    with pipe:
        yield pipe
    parts.scheduler.check_integrity()


@pytest.fixture(scope="module")
def recorded(model):
    """Prompts of 17 and 40 tokens (the longer one takes two chunks) and what is recorded of them."""
    inputs, expected = np.load(model / "inputs.npz"), np.load(model / "expected.npz")
    return [(inputs[f"{p}_ids"].tolist(), {k: expected[f"{p}_{k}"] for k in KINDS}) for p in ("p17", "p40")]


KINDS = ("logits", "logprobs", "gen_ids", "gen_logprobs")


@pytest.fixture(scope="module")
def tolerance(goldens):
    cases = json.loads((goldens / "manifest.json").read_text())["cases"]
    return next(case for case in cases if case["name"] == "llama_plain")["tolerance"]["float32_engine"]


def test_rows_that_are_asked_for_are_the_recorded_ones(pipe, recorded, tolerance):
    prompts = [ids for ids, _ in recorded]
    responses = pipe(prompts, GenerationConfig(max_new_tokens=16, **EXTRAS))
    for response, (ids, want) in zip(responses, recorded, strict=True):
        assert response.token_ids == want["gen_ids"].tolist()
        got = [found[token] for token, found in zip(ids[1:], response.prompt_logprobs[1:], strict=True)]
        np.testing.assert_allclose(got, want["logprobs"], atol=tolerance["logprobs_atol"], rtol=0)
        got = [found[token] for token, found in zip(response.token_ids, response.logprobs, strict=True)]
        np.testing.assert_allclose(got, want["gen_logprobs"], atol=tolerance["logprobs_atol"], rtol=0)
        assert response.logits.shape == (len(ids) + 15, 256)
        last = response.logits[len(ids) - 4 : len(ids)]
        np.testing.assert_allclose(last, want["logits"], atol=tolerance["logits_atol"], rtol=0)
        assert response.logits[len(ids) - 1 :].argmax(-1).tolist() == response.token_ids
        assert response.last_hidden_state.shape == (16, 128)
        assert response.processed_logprobs == response.logprobs, "nothing changed the logits"


def test_get_ppl_is_the_recorded_loss(pipe, recorded, tolerance):
    got = pipe.get_ppl([ids for ids, _ in recorded])
    want = [-np.mean(want["logprobs"], dtype=np.float64) for _, want in recorded]
    np.testing.assert_allclose(got, want, atol=tolerance["logprobs_atol"], rtol=0)


def test_what_one_request_asks_for_changes_no_other_answer(pipe, recorded):
    plain, rich = GenerationConfig(max_new_tokens=16), GenerationConfig(max_new_tokens=16, **EXTRAS)
    penalised = GenerationConfig(max_new_tokens=16, repetition_penalty=1.5, logit_bias={7: 3.0})
    (short, want), (long, want_long) = recorded
    responses = pipe([short, long, short, long], [plain, rich, penalised, plain])
    assert responses[0].token_ids == want["gen_ids"].tolist()
    assert responses[1].token_ids == responses[3].token_ids == want_long["gen_ids"].tolist()
    assert responses[2].token_ids != responses[0].token_ids


def test_processed_logprobs_are_those_after_bias_and_bans(pipe, recorded):
    ids, want = recorded[0]
    first = int(want["gen_ids"][0])
    second = int(np.argsort(want["logits"][-1])[-2])
    banned = pipe(ids, GenerationConfig(max_new_tokens=1, bad_token_ids=[first], logprobs=2))
    assert banned.token_ids == [second]
    assert list(banned.logprobs[0]) == [first, second]
    assert list(banned.processed_logprobs[0]) == [second], "what cannot come has no probability"
    logits = want["logits"][-1].astype(np.float64)
    logits[first] = -np.inf
    np.testing.assert_allclose(
        banned.processed_logprobs[0][second], logits[second] - np.logaddexp.reduce(logits), atol=1e-3
    )


def test_a_processor_gets_the_parameters_of_its_request_alone(pipe, recorded):
    (ids, want), row = recorded[0], np.zeros(256)
    row[9] = 1
    plain, steered = GenerationConfig(max_new_tokens=5), {"max_new_tokens": 5, "logits_processor": "steer"}
    configs = [plain, *(GenerationConfig(**steered, logits_processor_params=(a, row)) for a in (0.0, 100.0))]
    free, neutral, pushed = (r.token_ids for r in pipe([ids] * 3, configs))
    assert free == neutral == want["gen_ids"][:5].tolist()
    assert pushed == [9] * 5


def test_guided_and_unguided_requests_share_a_batch(pipe, recorded, monkeypatch):
    """The model has no tokenizer: token i is taken for character 256 + i."""
    vocabulary = Vocabulary([chr(256 + i).encode() for i in range(256)])
    (ids, want), (long, want_long) = recorded
    bad = "".join(chr(256 + t) for t in want["gen_ids"][2:4])

    def guide(config):
        return BadWords(config.bad_words, vocabulary, 256) if config.bad_words else None

    monkeypatch.setattr(pipe._builder, "_guides", SimpleNamespace(guide=guide))
    configs = [GenerationConfig(max_new_tokens=16, bad_words=words) for words in ([bad], [], ["\u4e00"], [])]
    cut, whole, free, again = (r.token_ids for r in pipe([ids, long, ids, long], configs))
    expected = want["gen_ids"].tolist()
    assert cut[:3] == expected[:3]
    assert bad not in "".join(chr(256 + t) for t in cut)
    assert free == expected, "a guide that forbids nothing changes nothing"
    assert whole == again == want_long["gen_ids"].tolist()


def test_samples_of_a_prompt_differ_and_each_is_what_it_is_alone(pipe, recorded):
    ids, _ = recorded[1]
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": 8, "random_seed": 5}
    together = pipe(ids, GenerationConfig(n=2, **sampled))
    assert together[0].token_ids != together[1].token_ids
    again = pipe([ids, ids], [GenerationConfig(**sampled), GenerationConfig(n=2, **sampled)])
    assert [r.token_ids for r in again] == [together[i].token_ids for i in (0, 0, 1)]
