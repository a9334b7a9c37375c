"""batch_invariant=True: bit by bit the same logits and tokens, whatever else runs and however a request is run."""

import dataclasses

import numpy as np
import pytest

from tests.runner.harness import open_pipe
from turbojax import assembly
from turbojax.configs import GenerationConfig
from turbojax.models.model import load_model

WANTED = {"max_new_tokens": 12, "output_logits": "all"}
GEN_CONFIGS = (
    GenerationConfig(**WANTED),
    GenerationConfig(**WANTED, do_sample=True, temperature=1.0, top_k=40, top_p=0.9, random_seed=4),
    GenerationConfig(**WANTED, repetition_penalty=1.3, frequency_penalty=0.2),
)
# Ways to run that other batches, chunks and histories come of.
WAYS = {
    "a batch of four": {"max_batch_size": 4, "enable_prefix_caching": False},
    "chunks of a page, few pages": {
        "max_batch_size": 3, "max_prefill_token_num": 16, "cache_max_entry_count": 6, "enable_prefix_caching": False,
    },
    "cached": {"max_batch_size": 4, "enable_prefix_caching": True},  # programs of the batch of four
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded(request, model):
    bits = getattr(request, "param", 16)
    return load_model(model, dtype="float32", kv_bits=lambda layer: (bits, bits))


def run(loaded, prompts, configs, *, times=1, **config):
    pipe, parts = open_pipe(loaded, batch_invariant=True, **config)
    with pipe:
        for _ in range(times):
            responses = pipe(prompts, configs)
    return responses, parts.scheduler.metrics


@pytest.fixture(scope="module")
def alone(loaded, golden):
    """Each prompt by itself, one after the other."""
    prompts, _ = golden
    configs = [GEN_CONFIGS[i % len(GEN_CONFIGS)] for i in range(len(prompts))]
    return run(loaded, prompts, configs, max_batch_size=1, enable_prefix_caching=False)[0], configs


@pytest.mark.parametrize(
    ("loaded", "way"),
    [*((16, way) for way in WAYS), pytest.param(4, "chunks of a page, few pages", marks=pytest.mark.slow)],
    indirect=["loaded"],
)
def test_bits_do_not_depend_on_how_a_request_is_run(loaded, golden, alone, way):
    (prompts, _), (expected, configs) = golden, alone
    options = WAYS[way]
    times = 2 if options["enable_prefix_caching"] else 1
    if times == 2:  # what wants its prompt's logits computes them all, and would not read the cache
        configs = [dataclasses.replace(config, output_logits="generation") for config in configs]
    found, metrics = run(loaded, prompts, configs, times=times, **options)
    assert metrics.num_preemptions > 0 or "few pages" not in way
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.num_cached_tokens > 0 or times == 1 or one.num_input_tokens <= 16
        rows = len(one.logits)
        np.testing.assert_array_equal(one.logits.view(np.uint32), other.logits[-rows:].view(np.uint32))
    assert len(found[0].logits) == len(expected[0].logits) - (times == 2) * (len(prompts[0]) - 1)


def test_few_programs_do_for_all_steps(loaded):
    limits, buckets = assembly.limits_of(assembly.EngineConfig(batch_invariant=True), loaded.spec)
    assert buckets.num_programs == 6
    assert limits.num_decode_steps == 1


@pytest.mark.long
def test_smollm2_alone_and_in_company(smollm2):
    """4-bit and 8-bit codes, KV8: tiles that prompts share, against tiles of their own."""
    smol = load_model(smollm2, dtype="float32", kv_bits=(8, 8))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 40000, num_tokens).tolist() for num_tokens in (40, 7, 25)]
    configs = [dataclasses.replace(config, max_new_tokens=4) for config in GEN_CONFIGS]
    limits = {"session_len": 256, "max_batch_size": 3, "max_prefill_token_num": 64, "cache_max_entry_count": 49}
    together, _ = run(smol, prompts, configs, **limits)
    for prompt, config, one in zip(prompts, configs, together, strict=True):
        (alone,), _ = run(smol, [prompt], [config], **limits)
        assert alone.token_ids == one.token_ids
        np.testing.assert_array_equal(alone.logits.view(np.uint32), one.logits.view(np.uint32))
