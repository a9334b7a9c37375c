"""LMDeploy's configs: every field is mapped, or refused where it would do nothing."""

import dataclasses

import pytest

import turbojax
from turbojax.compat import GenerationConfig, TurbomindEngineConfig
from turbojax.errors import ConfigError

# Fields of LMDeploy 0.2 .. 0.12, by its source, that scripts set.
LMDEPLOY_ENGINE = (
    "model_name", "model_format", "tp", "session_len", "max_batch_size", "cache_max_entry_count", "quant_policy",
    "rope_scaling_factor", "use_logn_attn", "download_dir", "revision", "max_prefill_token_num", "num_tokens_per_iter",
    "max_prefill_iters", "cache_block_seq_len", "enable_prefix_caching", "dtype", "cache_chunk_size", "dp", "devices",
    "empty_init", "communicator", "hf_overrides", "enable_metrics",
)  # fmt: skip
LMDEPLOY_GENERATION = (
    "n", "max_new_tokens", "do_sample", "top_p", "top_k", "min_p", "temperature", "repetition_penalty", "ignore_eos",
    "random_seed", "stop_words", "bad_words", "stop_token_ids", "bad_token_ids", "min_new_tokens",
    "skip_special_tokens", "spaces_between_special_tokens", "logprobs", "response_format", "logits_processors",
    "output_logits", "output_last_hidden_state", "with_cache", "preserve_cache", "migration_request",
)  # fmt: skip
# Another value than the default for each mapped field, and what turbojax gets.
ENGINE = {
    "dtype": "bfloat16", "model_format": "awq", "session_len": 4096, "max_batch_size": 64,
    "cache_max_entry_count": 0.85, "cache_block_seq_len": 32, "enable_prefix_caching": False, "quant_policy": 8,
    "max_prefill_token_num": 512, "tp": 2, "dp": 2,
}  # fmt: skip
GENERATION = {
    "n": 2, "max_new_tokens": 7, "do_sample": True, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "temperature": 0.7,
    "repetition_penalty": 1.1, "ignore_eos": True, "random_seed": 3, "stop_words": ["x"], "bad_words": ["y"],
    "stop_token_ids": [4], "bad_token_ids": [5], "min_new_tokens": 2, "skip_special_tokens": False, "logprobs": 2,
    "response_format": {"type": "json_object"}, "output_logits": "all", "output_last_hidden_state": "generation",
    "include_stop_str_in_output": True, "repetition_ngram_size": 3, "repetition_ngram_threshold": 4,
}  # fmt: skip
OTHER = {
    "rope_scaling_factor": 2.0, "use_logn_attn": True, "download_dir": "/models", "revision": "v1", "devices": [0],
    "empty_init": True, "communicator": "native", "hf_overrides": {}, "enable_metrics": False,
    "language_model_only": True, "dist_init_addr": "host:1", "node_rank": 1, "async_": 0, "num_tokens_per_iter": 64,
    "spaces_between_special_tokens": False, "logits_processors": [print], "return_ppl": True, "with_cache": True,
    "preserve_cache": True, "migration_request": "r", "return_routed_experts": True,
}  # fmt: skip


def names(kind):
    return {field.name for field in dataclasses.fields(kind)}


def test_every_field_of_lmdeploy_is_known():
    assert set(LMDEPLOY_ENGINE) <= names(TurbomindEngineConfig)
    assert set(LMDEPLOY_GENERATION) <= names(GenerationConfig)


@pytest.mark.parametrize("field", ENGINE)
def test_an_engine_field_is_mapped(field):
    config = TurbomindEngineConfig(**{field: ENGINE[field]}).to_turbojax()
    assert getattr(config, field) == ENGINE[field] != getattr(turbojax.EngineConfig(), field)


@pytest.mark.parametrize("field", GENERATION)
def test_a_generation_field_is_mapped(field):
    more = {"repetition_ngram_size": 3, "repetition_ngram_threshold": 4} if "ngram" in field else {}
    config = GenerationConfig(**more | {field: GENERATION[field]}).to_turbojax(samples=False)
    value = GENERATION[field]
    assert getattr(config, field) == (tuple(value) if isinstance(value, list) else value)
    assert getattr(config, field) != getattr(turbojax.GenerationConfig(), field)


@pytest.mark.parametrize("kind", [TurbomindEngineConfig, GenerationConfig])
def test_a_field_that_would_do_nothing_is_refused_by_name_and_its_own_value_taken(kind):
    assert kind.FIXED.keys() <= names(kind)
    for field, (value, _) in kind.FIXED.items():
        assert getattr(kind(), field) == value
        with pytest.raises(ConfigError, match=rf"{kind.__name__}\.{field} is .*; accepted: .* alone: \w+") as found:
            kind(**{field: OTHER.get(field, 2)})
        assert found.value.field == field


def test_every_field_is_mapped_or_refused():
    assert names(TurbomindEngineConfig) == ENGINE.keys() | TurbomindEngineConfig.FIXED.keys() | {"model_name"}
    assert names(GenerationConfig) == GENERATION.keys() | GenerationConfig.FIXED.keys() | {"stream"}


def test_defaults_are_lmdeploys():
    config = GenerationConfig().to_turbojax(samples=False)
    assert not config.do_sample
    assert (config.temperature, config.top_p, config.top_k, config.min_p) == (0.8, 1.0, 50, 0.0)
    assert (config.repetition_penalty, config.max_new_tokens, config.n, config.min_new_tokens) == (1.0, 512, 1, 0)


def test_who_samples_where_nothing_is_said():
    assert GenerationConfig(temperature=0.7).to_turbojax(samples=True).do_sample
    assert not GenerationConfig(do_sample=False).to_turbojax(samples=True).do_sample
    assert GenerationConfig(do_sample=True).to_turbojax(samples=False).do_sample


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GenerationConfig(do_sample="yes"), r"do_sample is 'yes'; accepted: None, True or False"),
        (lambda: GenerationConfig(stream=1.5), r"stream is 1.5"),
        (lambda: GenerationConfig(temperature=-1.0), r"temperature is -1.0"),
        (lambda: TurbomindEngineConfig(quant_policy=3), r"quant_policy is 3"),
        (lambda: TurbomindEngineConfig(model_format="llama"), r"model_format is 'llama'"),
        (lambda: TurbomindEngineConfig(model_name=7), r"model_name is 7"),
        (lambda: TurbomindEngineConfig(tp=0), r"tp is 0"),
        (lambda: TurbomindEngineConfig(cp=2), r"cp is 2; accepted: 1 alone"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_config_that_was_changed_is_checked_again():
    config = GenerationConfig()
    config.top_p = 2.0
    with pytest.raises(ConfigError, match=r"top_p is 2\.0"):
        config.to_turbojax(samples=True)
