"""Rows as ray.data.llm writes them: which prompt counts, vLLM's names of parameters, and errors that name columns."""

import pytest

from turbojax.configs import GenerationConfig
from turbojax.engine.response import Response
from turbojax.errors import ConfigError, RowError
from turbojax.integrations.ray_rows import ERROR_COLUMN, answer_columns, check_base, config_of, job_of

BASE = GenerationConfig(max_new_tokens=9)
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "Hi"}, "Hi"),
        ({"messages": CHAT}, CHAT),
        ({"tokenized_prompt": [1, 2]}, [1, 2]),
        ({"prompt": "what it was made of", "messages": CHAT}, CHAT),
        ({"prompt": "<user>Hi", "messages": CHAT, "tokenized_prompt": [3]}, [3]),
        ({"prompt": "Hi", "messages": None, "tokenized_prompt": None}, "Hi"),
        ({"messages": [CHAT[0] | {"tool_calls": None}]}, CHAT),
    ],
)
def test_the_prompt_nearest_to_tokens_counts(row, prompt):
    job = job_of(row | {"id": 7}, BASE)
    assert job.prompt == prompt
    assert job.config is BASE


def test_parameters_have_vllms_names_or_our_own():
    params = {
        "max_tokens": 5, "min_tokens": 2, "seed": 3, "stop": "END", "top_k": -1, "temperature": 0.5,
        "presence_penalty": 0.25, "logit_bias": {"12": 1.5}, "n": 1, "ignore_eos": True, "top_p": None,
        "structured_outputs": {"json": None, "regex": "[0-9]+"},
    }  # fmt: skip
    assert config_of(params, BASE) == GenerationConfig(
        max_new_tokens=5, min_new_tokens=2, random_seed=3, stop_words=("END",), top_k=0, temperature=0.5,
        presence_penalty=0.25, logit_bias={12: 1.5}, ignore_eos=True, do_sample=True,
        response_format={"type": "regex_schema", "regex_schema": "[0-9]+"},
    )  # fmt: skip
    assert config_of({"max_new_tokens": 5, "stop_words": ["a", "b"]}, BASE) == GenerationConfig(
        max_new_tokens=5, stop_words=("a", "b")
    )


def test_a_row_that_names_no_sampling_field_is_greedy_and_a_temperature_of_zero_too():
    assert config_of({"max_tokens": 5}, BASE).is_greedy
    assert config_of({"temperature": 0.0}, BASE).is_greedy
    assert not config_of({"temperature": 0.7}, BASE).is_greedy


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": 1}, "no prompt: one of tokenized_prompt, messages, prompt"),
        ({"prompt": 5}, "prompt is 5; accepted: a text"),
        ({"messages": "Hi"}, "messages is 'Hi'; accepted: a list of objects"),
        ({"messages": []}, "messages is \\[\\]"),
        ({"tokenized_prompt": [1.5]}, "tokenized_prompt is \\[1.5\\]; accepted: a list of token ids"),
        ({"prompt": "Hi", "sampling_params": "greedy"}, "sampling_params is 'greedy'; accepted: an object"),
        ({"prompt": "Hi", "sampling_params": {"best_of": 2}}, "sampling_params has best_of; accepted: bad_token_ids, "),
        ({"prompt": "Hi", "sampling_params": {"seed": 1, "random_seed": 1}}, "both seed and random_seed"),
        ({"prompt": "Hi", "sampling_params": {"temperature": -1.0}}, "temperature is -1.0; accepted: None or a number"),
        ({"prompt": "Hi", "sampling_params": {"n": 2}}, "n is 2; accepted: 1: a row has one answer"),
        ({"prompt": "Hi", "sampling_params": {"logprobs": 2}}, "logprobs: rows have it where the job's own"),
        ({"prompt": "Hi", "sampling_params": {"structured_outputs": {"xml": ""}}}, "one of json, regex, choice"),
        ({"prompt": "Hi", "sampling_params": {"output_logits": "all"}}, "sampling_params has output_logits"),
    ],
)
def test_a_broken_row_names_the_column_what_came_and_what_is_accepted(row, words):
    with pytest.raises(RowError, match=words):
        job_of(row, BASE)


def test_a_job_asks_for_nothing_that_rows_have_no_place_for():
    with pytest.raises(ConfigError, match="output_logits"):
        check_base(GenerationConfig(output_logits="all"))
    with pytest.raises(ConfigError, match="one answer"):
        check_base(GenerationConfig(n=2, do_sample=True))


def test_answers_become_columns_and_errors_leave_them_empty():
    answers = [Response("ab", [4, 5], "stop", 3, 2, logprobs=[{4: -0.5}, {5: -1.0, 6: -2.0}]), RowError("broken")]
    columns = answer_columns(answers, GenerationConfig(logprobs=2), with_errors=True)
    assert columns == {
        "generated_text": ["ab", ""],
        "generated_tokens": [[4, 5], []],
        "num_input_tokens": [3, 0],
        "num_generated_tokens": [2, 0],
        "finish_reason": ["stop", "error"],
        "logprobs": [
            [[{"token_id": 4, "logprob": -0.5}], [{"token_id": 5, "logprob": -1.0}, {"token_id": 6, "logprob": -2.0}]],
            [],
        ],
        ERROR_COLUMN: ["", "broken"],
    }
    assert ERROR_COLUMN not in answer_columns(answers, BASE, with_errors=False)
