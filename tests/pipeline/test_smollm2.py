"""Answers of the real small model that are bounded by a format or by words, beside its recorded ones."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from turbojax import EngineConfig, GenerationConfig, pipeline

EXPECTED = Path(__file__).parents[3] / "shared" / "smollm2" / "expected.json"
pytestmark = pytest.mark.slow
ANYTHING = {"type": "regex_schema", "regex_schema": r"(?s:.*)"}


@pytest.fixture(scope="module")
def pipe(smollm2):
    pytest.importorskip("llguidance")
    # Few programs, which the server of tests/serve/test_smollm2.py has, too.
    small = EngineConfig(
        dtype="float32", session_len=192, max_batch_size=1, max_prefill_token_num=64, cache_max_entry_count=13
    )
    with pipeline(smollm2, small) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def prompt():
    if not EXPECTED.is_file():
        pytest.skip(f"the recorded outputs are not at {EXPECTED}")
    return next(p for p in json.loads(EXPECTED.read_text())["prompts"] if p["id"] == "english")


def test_a_format_that_allows_everything_gives_the_recorded_answer(pipe, prompt):
    config = GenerationConfig(
        max_new_tokens=24, ignore_eos=True, response_format=ANYTHING, prompt_logprobs=0, logprobs=5
    )
    response = pipe(prompt["input_ids"], config)
    num_clear = min(24, prompt["greedy"]["near_tie"] or 24)
    assert response.token_ids[:num_clear] == prompt["greedy"]["ids"][:num_clear]
    pairs = zip(prompt["input_ids"][1:], response.prompt_logprobs[1:], strict=True)
    # Recorded with float32 weights of the same file; 4 decimals.
    np.testing.assert_allclose([found[t] for t, found in pairs], prompt["prompt_logprobs"][1:], atol=2e-3)
    want = {entry["id"]: entry["logprob"] for entry in prompt["next_token_top5"]}
    assert response.logprobs[0] == pytest.approx(want, abs=2e-3)


def test_a_greedy_answer_satisfies_its_schema_and_ends_there(pipe):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "minimum": 0}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    response = pipe(
        "Name a city and how many people live there.", GenerationConfig(max_new_tokens=60, response_format=form)
    )
    assert response.finish_reason == "stop"
    answer = json.loads(response.text)
    assert answer.keys() == {"city", "people"}
    assert isinstance(answer["city"], str)
    assert isinstance(answer["people"], int)


def test_a_greedy_answer_matches_its_pattern(pipe):
    form = {"type": "regex_schema", "regex_schema": r"The answer is [0-9]{1,3}\."}
    response = pipe("What is 2 + 2?", GenerationConfig(max_new_tokens=20, response_format=form))
    assert re.fullmatch(form["regex_schema"], response.text)


def test_bad_words_and_stop_words_are_found_across_tokens(pipe, prompt):
    config = {"max_new_tokens": 24, "ignore_eos": True, "response_format": ANYTHING}
    free = pipe(prompt["input_ids"], GenerationConfig(**config))
    word = free.text[10:19]
    assert len(pipe.tokenizer.encode(word)) > 1
    cut = pipe(prompt["input_ids"], GenerationConfig(**config, stop_words=[word]))
    assert cut.text == free.text[: free.text.index(word)]
    avoids = pipe(prompt["input_ids"], GenerationConfig(**config, bad_words=[word]))
    assert word not in avoids.text
    assert avoids.num_generated_tokens == 24
