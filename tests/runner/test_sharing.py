"""A real model with KV of 16 and 4 bits: cached = computed, together = alone, preempted = undisturbed."""

from dataclasses import replace

import numpy as np
import pytest

from tests.core.harness import all_logits, chunks, fresh
from tests.runner.harness import SMALL
from turbojax.api import Pipeline
from turbojax.assembly import assemble_model
from turbojax.configs import EngineConfig, GenerationConfig
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.plan import SamplingParams
from turbojax.engine.prefix_cache import PrefixCache
from turbojax.engine.request import Request
from turbojax.engine.scheduler import Scheduler
from turbojax.models.model import load_model

NUM_NEW, NUM_PROMPTS, STEM_LEN = 12, 4, 40
# Pages of 16 tokens: two whole ones of the stem are shared, and half of a third is copied.
PAGE_LEN, NUM_PAGES = 16, 30
# Rounding moves logits by less: of float32 products in another order; of codes that round to their neighbours.
NEAR_TIE = {16: 1e-3, 4: 0.3}


def prompts_of(vocab_size):
    """They begin alike, and are 45, 46, ... tokens long."""
    rng = np.random.default_rng(5)
    stem = rng.integers(3, vocab_size, STEM_LEN)
    return [np.concatenate([stem, rng.integers(3, vocab_size, 5 + i)]).tolist() for i in range(NUM_PROMPTS)]


def configs():
    """Two greedy requests and two seeded ones."""
    common = {"max_new_tokens": NUM_NEW, "ignore_eos": True}
    sampled = common | {"do_sample": True, "temperature": 0.7, "top_k": 0}
    seeded = [GenerationConfig(**sampled, random_seed=i) for i in range(NUM_PROMPTS // 2)]
    return [GenerationConfig(**common)] * (NUM_PROMPTS - len(seeded)) + seeded


class Engine:
    """One runner, whose programs are compiled once, under a fresh scheduler for each way to run."""

    def __init__(self, model):
        config = EngineConfig(**(SMALL | {"num_decode_steps": 1, "cache_max_entry_count": NUM_PAGES}))
        self.model, self.parts = model, assemble_model(model, config)

    def generate(self, prompts, *, together, rounds=1, caching=True, num_pages=NUM_PAGES):
        """Tokens of each prompt in the last round, and what the engine counted."""
        pool = BlockPool(num_pages, PAGE_LEN)
        scheduler = Scheduler(self.parts.scheduler.config, pool, cache=PrefixCache(pool, is_enabled=caching))
        vocab_size = self.model.spec.vocab_size
        with Pipeline(self.parts.runner, scheduler, None, vocab_size=vocab_size, eos_ids=()) as pipe:
            for _ in range(rounds):
                if together:
                    responses = pipe(prompts, configs())
                else:
                    responses = [pipe(prompt, config) for prompt, config in zip(prompts, configs(), strict=True)]
        scheduler.check_integrity()
        return [response.token_ids for response in responses], scheduler.metrics


def assert_same(model, prompts, got, want, bits):
    """Equal tokens, up to the first choice between two that were as good as equally likely; sampled ones are equal."""
    for prompt, config, a, b in zip(prompts, configs(), got, want, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is None:
            continue
        assert config.is_greedy, "a sampled token differs"
        ids = np.asarray(prompt + a[:at], np.int32)
        state = fresh(model.spec, num_slots=1, page_len=PAGE_LEN, max_len=128)
        _, logits = all_logits(model.weights, state, chunks((0, ids, 0, True), sink=1, size=128), PAGE_LEN)
        gap = abs(float(logits[len(ids) - 1, a[at]] - logits[len(ids) - 1, b[at]]))
        assert gap < NEAR_TIE[bits], f"token {at}: {a[at]} and {b[at]}, whose logits are {gap} apart"


@pytest.mark.parametrize("bits", [16, pytest.param(4, marks=pytest.mark.slow)])
def test_what_a_request_gives_does_not_depend_on_what_the_pool_had(goldens, bits):
    model = load_model(goldens / "llama_plain", dtype="float32", kv_bits=lambda layer: (bits, bits))
    engine, prompts = Engine(model), prompts_of(model.spec.vocab_size)
    alone, counted = engine.generate(prompts, together=False, caching=False)
    assert (counted.num_cached_tokens, counted.num_preemptions) == (0, 0)

    together, counted = engine.generate(prompts, together=True)
    assert counted.num_cached_tokens >= 2 * STEM_LEN
    assert_same(model, prompts, together, alone, bits)

    again, counted = engine.generate(prompts, together=False, rounds=2)
    assert counted.num_cached_tokens >= 3 * STEM_LEN + sum(len(prompt) - 1 for prompt in prompts)
    assert_same(model, prompts, again, alone, bits)

    # Two sequences of 4 pages, 2 of them shared, in 5 pages.
    preempted, counted = engine.generate(prompts, together=True, num_pages=6)
    assert counted.num_preemptions > 0
    assert_same(model, prompts, preempted, alone, bits)


def test_an_engine_shares_only_among_lengths_that_its_rope_treats_alike(goldens):
    """Nothing runs: sequences of 32 tokens and of 33 have other keys, so they begin in different places."""
    model = load_model(goldens / "llama_plain", dtype="float32")
    layer = model.spec.segments[0].layer
    rope = replace(layer.rope, kind="longrope", long_inv_freq=layer.rope.inv_freq, original_max_len=32)
    segments = tuple(replace(segment, layer=replace(segment.layer, rope=rope)) for segment in model.spec.segments)
    settings = EngineConfig(**(SMALL | {"cache_max_entry_count": NUM_PAGES}))
    cache = assemble_model(replace(model, spec=replace(model.spec, segments=segments)), settings).scheduler._cache
    requests = [Request(0, np.zeros(length, np.int32), SamplingParams(), (), 100) for length in (31, 32, 33)]
    names = [cache._root_key(r) for r in requests]
    assert names[0] == names[1] != names[2]
