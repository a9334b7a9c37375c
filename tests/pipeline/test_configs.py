"""What users set: bad fields are named; the model's own values stand in for those not given."""

from dataclasses import fields
from pathlib import Path

import pytest

from turbojax.configs import EngineConfig, GenerationConfig
from turbojax.errors import ConfigError
from turbojax.generation import model_defaults, with_defaults


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (GenerationConfig, "temperature", -1),
        (GenerationConfig, "temperature", float("nan")),
        (GenerationConfig, "top_p", 0),
        (GenerationConfig, "top_p", 1.5),
        (GenerationConfig, "top_k", -1),
        (GenerationConfig, "min_p", 2),
        (GenerationConfig, "max_new_tokens", 0),
        (GenerationConfig, "max_new_tokens", True),
        (GenerationConfig, "min_new_tokens", 600),
        (GenerationConfig, "random_seed", 2**32),
        (GenerationConfig, "stop_words", "text"),
        (GenerationConfig, "stop_words", [""]),
        (GenerationConfig, "stop_token_ids", [-1]),
        (GenerationConfig, "ignore_eos", 1),
        (GenerationConfig, "priority", 1.5),
        (GenerationConfig, "timeout_s", 0),
        (GenerationConfig, "cache_salt", ""),
        (GenerationConfig, "include_stop_str_in_output", "yes"),
        (GenerationConfig, "n", 0),
        (GenerationConfig, "repetition_penalty", 0),
        (GenerationConfig, "presence_penalty", 3),
        (GenerationConfig, "frequency_penalty", float("inf")),
        (GenerationConfig, "logit_bias", {3: 101}),
        (GenerationConfig, "logit_bias", {"x": 1.0}),
        (GenerationConfig, "logit_bias", [(3, 1.0), (3, 2.0)]),
        (GenerationConfig, "logit_bias", 3),
        (GenerationConfig, "bad_token_ids", range(600)),
        (GenerationConfig, "bad_words", ["ok", ""]),
        (GenerationConfig, "logits_processor", 3),
        (GenerationConfig, "logits_processor_params", [1.0]),
        (GenerationConfig, "logprobs", 21),
        (GenerationConfig, "prompt_logprobs", True),
        (GenerationConfig, "output_logits", "prompt"),
        (GenerationConfig, "output_last_hidden_state", True),
        (GenerationConfig, "response_format", "json"),
        (GenerationConfig, "response_format", {"type": "xml"}),
        (GenerationConfig, "response_format", {"type": "choice", "choice": []}),
        (GenerationConfig, "response_format", {"type": "choice", "choice": "ab"}),
        (GenerationConfig, "response_format", {"type": "json_schema"}),
        (GenerationConfig, "response_format", {"type": "regex_schema", "regex_schema": "a", "flags": "i"}),
        (GenerationConfig, "repetition_ngram_size", 2000),
        (GenerationConfig, "repetition_ngram_threshold", 3),
        (EngineConfig, "dtype", "int8"),
        (EngineConfig, "session_len", 1),
        (EngineConfig, "max_batch_size", 0),
        (EngineConfig, "enable_prefix_caching", 1),
        (EngineConfig, "cache_max_entry_count", 1.5),
        (EngineConfig, "cache_max_entry_count", 1),
        (EngineConfig, "cache_block_seq_len", 48),
        (EngineConfig, "quant_policy", 2),
        (EngineConfig, "k_bits", 3),
        (EngineConfig, "kv_policy", [(16,)]),
        (EngineConfig, "max_prefill_token_num", 10),
        (EngineConfig, "num_decode_steps", 65),
        (EngineConfig, "max_queue_len", -1),
        (EngineConfig, "compile_ahead", "yes"),
    ],
)
def test_a_field_out_of_range_is_named(config, field, value):
    with pytest.raises(ConfigError, match=rf"{config.__name__}\.{field} is .*accepted"):
        config(**{field: value})


def test_a_kv_policy_excludes_the_other_fields_and_covers_every_layer():
    with pytest.raises(ConfigError, match="kv_policy"):
        EngineConfig(kv_policy=[(8, 8)], quant_policy=8)
    config = EngineConfig(kv_policy=[(8, 4)])
    assert config.kv_bits(0) == (8, 4)
    with pytest.raises(ConfigError, match="layer 1"):
        config.kv_bits(1)
    assert EngineConfig(quant_policy=4, k_bits=8).kv_bits(3) == (8, 4)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stop_token_ids": [5], "bad_token_ids": [4, 5]}, "bad_token_ids"),
        ({"stop_words": ["END"], "bad_words": ["EN"]}, "bad_words"),
    ],
)
def test_what_must_end_an_answer_cannot_be_forbidden(fields, field):
    with pytest.raises(ConfigError, match=rf"{field} is "):
        GenerationConfig(**fields)


def test_every_field_of_a_request_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "generation.md").read_text()
    assert not [field.name for field in fields(GenerationConfig) if f"`{field.name}`" not in text]


QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": [1, 2], "min_p": None}


def test_a_sampled_request_takes_what_it_leaves_open_from_the_model_then_from_lmdeploy():
    defaults = model_defaults(QWEN)
    config = with_defaults(GenerationConfig(do_sample=True, top_p=0.5), defaults)
    assert (config.temperature, config.top_p, config.top_k, config.min_p) == (0.7, 0.5, 20, 0.0)
    config = with_defaults(GenerationConfig(do_sample=True), {})
    assert (config.temperature, config.top_p, config.top_k, config.min_p) == (0.8, 1.0, 50, 0.0)


def test_a_greedy_request_takes_nothing_from_the_model_and_the_model_cannot_make_one_sample():
    config = with_defaults(GenerationConfig(), model_defaults(QWEN))
    assert config.is_greedy
    assert config.top_p == 1.0
    assert with_defaults(GenerationConfig(do_sample=True), {"temperature": 0.0}).is_greedy


def test_a_value_of_the_model_that_is_out_of_range_is_left_out_with_a_warning(caplog):
    assert model_defaults({"top_p": 7, "top_k": 3}) == {"top_k": 3}
    assert "generation_config.json: GenerationConfig.top_p is 7" in caplog.text
