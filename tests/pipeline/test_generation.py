"""What a GenerationConfig asks for and what a response then has, on an engine without a device."""

import numpy as np
import pytest

from tests.engine.fake import VOCAB
from tests.pipeline.harness import GEN, expected, make, pipe, request_of
from turbojax.configs import MAX_STOP_IDS, GenerationConfig
from turbojax.engine.plan import SamplingParams
from turbojax.errors import (
    ConfigError,
    InvalidPromptError,
    MissingTokenizerError,
)
from turbojax.processors import LogitsProcessor
from turbojax.request_builder import sampling_of

__all__ = ["pipe"]


def test_without_a_limit_an_answer_ends_with_the_session(pipe):
    response = pipe([2, 3], GenerationConfig(max_new_tokens=None, min_new_tokens=7, ignore_eos=True))
    assert (response.num_generated_tokens, response.finish_reason) == (98, "length")


def test_stop_words_end_the_text_and_the_request(pipe):
    free = pipe([9, 9], GenerationConfig(max_new_tokens=30, ignore_eos=True))
    word = free.text[4:6]
    cut = free.text.index(word)
    response = pipe([9, 9], GenerationConfig(max_new_tokens=30, ignore_eos=True, stop_words=[word]))
    assert response.text == free.text[:cut]
    assert response.finish_reason == "stop"
    assert response.token_ids == free.token_ids[: cut + 2]


def test_min_new_tokens_holds_stop_words_off(pipe):
    config = {"max_new_tokens": 30, "ignore_eos": True}
    free = pipe([9, 9], GenerationConfig(**config))
    word = free.text[1]
    response = pipe([9, 9], GenerationConfig(**config, stop_words=[word], min_new_tokens=5))
    assert response.num_generated_tokens > 5
    assert response.text.startswith(free.text[:5])


def test_configs_must_match_the_prompts_and_hold_few_stop_ids(pipe):
    with pytest.raises(ConfigError, match=r"2 configs.*3, one for each prompt"):
        pipe([[1], [2], [3]], [GEN, GEN])
    with pytest.raises(ConfigError, match=f"stop_token_ids.*at most {MAX_STOP_IDS}"):
        pipe([1], GenerationConfig(stop_token_ids=tuple(range(10, 10 + MAX_STOP_IDS))))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"n": 5, "do_sample": True}, r"n is 5; accepted: .* max_batch_size \(4\)"),
        ({"bad_token_ids": [VOCAB]}, r"bad_token_ids is .* below the vocabulary size"),
        ({"logit_bias": {VOCAB: 1.0}}, r"logit_bias is .* below the vocabulary size"),
        ({"logits_processor": "calm"}, r"logits_processor is 'calm'; accepted: .*logits_processors \(none\)"),
        ({"n": 2}, "n is 2; accepted: 1 where decoding is greedy"),
        ({"n": 2, "do_sample": True, "temperature": 0}, "n is 2; accepted: 1 where decoding is greedy"),
        ({"stop_token_ids": [VOCAB]}, rf"stop_token_ids is \({VOCAB},\); accepted: token ids below .* \({VOCAB}\)"),
    ],
)
def test_what_the_engine_cannot_honour_is_refused_before_anything_starts(pipe, config, match):
    before = pipe._loop._stepper._runner.num_dispatched
    with pytest.raises(ConfigError, match=match):
        pipe([[1, 2], [3]], GenerationConfig(**config))
    assert pipe._loop._stepper._runner.num_dispatched == before


def test_n_samples_of_a_prompt_are_n_responses_with_one_seed_and_an_index_each(pipe):
    sampled = {"do_sample": True, "max_new_tokens": 6}
    configs = [GenerationConfig(n=3, **sampled), GenerationConfig(**sampled)]
    requests = pipe._builder.requests([[1, 2], [3]], configs, print, do_preprocess=True)
    assert list(requests) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert len({requests[0, i].sampling.seed for i in range(3)}) == 1
    assert [requests[0, i].sampling.sample_index for i in range(3)] == [0, 1, 2]
    responses = pipe([[1, 2], [3]], configs)
    assert [(r.index, r.sample_index) for r in responses] == list(requests)
    assert [r.index for r in pipe([1, 2], configs[0])] == [0, 0, 0], "one prompt with several samples is a list"
    assert pipe([1, 2], configs[1]).token_ids == responses[0].token_ids
    pieces = list(pipe.stream_infer([1, 2], configs[0]))
    assert sorted(p.sample_index for p in pieces if p.finish_reason) == [0, 1, 2]


def test_what_ended_the_text_can_be_left_in_it(pipe):
    free = pipe([9, 9], GenerationConfig(max_new_tokens=30, ignore_eos=True))
    word, stop = free.text[4:6], free.token_ids[8]
    config = {"max_new_tokens": 30, "ignore_eos": True, "include_stop_str_in_output": True}
    response = pipe([9, 9], GenerationConfig(**config, stop_words=[word]))
    assert response.text == free.text[: free.text.index(word) + 2]
    response = pipe([9, 9], GenerationConfig(**config, stop_token_ids=[stop]))
    assert response.text == free.text[: free.token_ids.index(stop) + 1]


def test_a_repetition_ends_the_request(pipe):
    free = pipe([9, 9], GenerationConfig(max_new_tokens=80, ignore_eos=True))
    config = GenerationConfig(max_new_tokens=80, ignore_eos=True, repetition_ngram_size=1, repetition_ngram_threshold=3)
    response = pipe([9, 9], config)
    end = next(i for i, t in enumerate(free.token_ids) if free.token_ids[: i + 1].count(t) == 3)
    assert (response.token_ids, response.finish_reason) == (free.token_ids[: end + 1], "stop")


@pytest.mark.parametrize(
    "field", [{"stop_words": ["A"]}, {"bad_words": ["A"]}, {"response_format": {"type": "json_object"}}]
)
def test_what_speaks_of_text_needs_a_tokenizer(field):
    if "response_format" in field:
        pytest.importorskip("llguidance")
    with make(tokenizer=None) as pipe, pytest.raises(MissingTokenizerError, match=next(iter(field))):
        pipe([1], GenerationConfig(**field))


@pytest.mark.parametrize("params", [(), (1.0, 2.0), ([1.0, 2.0],), (1.0, [1.0, float("nan")]), (1.0, "ab")])
def test_parameters_of_a_processor_must_have_its_shapes(params):
    processors = {"calm": LogitsProcessor(lambda logits, times, in_prompt, a, b: logits, ((), (2,)))}
    with make(processors=processors) as pipe:
        good = GenerationConfig(logits_processor="calm", logits_processor_params=(1.0, [1.0, 2.0]))
        assert request_of(pipe, [1], good, print).sampling.processor == "calm"
        bad = GenerationConfig(logits_processor="calm", logits_processor_params=params)
        with pytest.raises(ConfigError, match=r"logits_processor_params is .*shapes \[\(\), \(2,\)\]"):
            pipe([1], bad)


def test_a_config_becomes_what_the_device_is_told():
    config = GenerationConfig(
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"3": 2.0},
        bad_token_ids=[4, 4],
        do_sample=True, temperature=0.6, top_p=0.9, top_k=7, min_p=0.1, random_seed=9,
    )  # fmt: skip
    assert sampling_of(config) == SamplingParams(
        temperature=0.6, top_k=7, top_p=0.9, min_p=0.1, seed=9, repetition_penalty=1.2, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias=((3, 2.0),), bad_token_ids=(4,),
    )  # fmt: skip
    greedy = sampling_of(GenerationConfig(repetition_penalty=1.2))
    assert (greedy.temperature, greedy.repetition_penalty) == (0.0, 1.2), "penalties change greedy answers too"
    assert sampling_of(GenerationConfig(temperature=0.7, top_k=3)) == SamplingParams()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("extent", ["all", "generation"])
def test_a_response_has_the_rows_that_were_asked_for(pipe, extent, stream):
    """The fake device writes into each row where it stands. The prompt of 21 tokens takes two chunks."""
    prompt = list(range(10, 31))
    config = GenerationConfig(
        max_new_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1, output_logits=extent,
        output_last_hidden_state="generation",
    )  # fmt: skip
    pieces = list(pipe.stream_infer(prompt, config)) if stream else [pipe(prompt, config)]
    tokens = [t for p in pieces for t in p.token_ids]
    assert tokens == expected(prompt, 5, ())
    logits = np.concatenate([p.logits for p in pieces])
    first = 0 if extent == "all" else 20
    assert logits.shape == (25 - first, VOCAB)
    assert logits[:, 0].tolist() == list(range(first, 25))
    assert np.concatenate([p.last_hidden_state for p in pieces])[:, 0].tolist() == list(range(20, 25))
    logprobs = [found for p in pieces for found in p.logprobs]
    assert logprobs == [{0: -p, 1: -p - 1} | {t: -p} for t, p in zip(tokens, range(20, 25), strict=True)]
    processed = [found for p in pieces for found in p.processed_logprobs]
    assert processed == [{0: -p, 1: -p} | {t: -p - 0.5} for t, p in zip(tokens, range(20, 25), strict=True)]
    prompt_logprobs = [found for p in pieces for found in p.prompt_logprobs or ()]
    assert prompt_logprobs == [None, *({0: -p} | {t: -p} for t, p in zip(prompt[1:], range(20), strict=True))]


def test_rows_behind_a_stop_word_are_cut_like_its_tokens(pipe):
    free = pipe([9, 9], GenerationConfig(max_new_tokens=30, ignore_eos=True))
    config = GenerationConfig(
        max_new_tokens=30, ignore_eos=True, stop_words=[free.text[4:6]], logprobs=0, output_logits="generation"
    )
    response = pipe([9, 9], config)
    assert len(response.token_ids) == len(response.logprobs) == len(response.logits) < 30


@pytest.mark.parametrize(
    ("fields", "reads_cache"),
    [
        ({"logprobs": 1, "output_logits": "generation"}, True),
        ({"prompt_logprobs": 0}, False),
        ({"output_last_hidden_state": "all"}, False),
    ],
)
def test_a_prompt_of_whose_rows_something_is_wanted_is_computed_whole(pipe, fields, reads_cache):
    assert request_of(pipe, [9, 9], GenerationConfig(**fields), print).reads_cache == reads_cache


def test_nothing_that_was_not_asked_for_comes_back(pipe):
    response = pipe([9, 9], GEN)
    assert (response.logprobs, response.processed_logprobs, response.prompt_logprobs) == (None, None, None)
    assert (response.logits, response.last_hidden_state) == (None, None)


def test_get_ppl_is_the_mean_loss_of_all_tokens_but_the_first(pipe):
    assert pipe.get_ppl([1, 2, 3, 4]) == [np.mean([0, 1, 2])]
    assert pipe.get_ppl([[1, 2], list(range(40))]) == [0.0, np.mean(range(39))]
    for wrong in ([1], [[1, 2], [3]], "text", [{"role": "user", "content": "A"}] * 2):
        with pytest.raises(InvalidPromptError, match="two token ids at least"):
            pipe.get_ppl(wrong)


def test_a_prompt_of_one_token_has_a_list_of_log_probabilities_that_says_nothing(pipe):
    config = GenerationConfig(max_new_tokens=3, ignore_eos=True, prompt_logprobs=0)
    assert pipe([7], config).prompt_logprobs == [None]
    pieces = list(pipe.stream_infer([7], config))
    assert [piece.prompt_logprobs for piece in pieces] == [[None]] + [None] * (len(pieces) - 1)
    assert pipe([7], GEN).prompt_logprobs is None
