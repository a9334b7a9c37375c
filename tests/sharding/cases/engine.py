"""Engines over several devices, as users open them: preemption, the prefix cache, rules, seeds, replicas."""

from __future__ import annotations

import numpy as np
import pytest

from turbojax.api import pipeline
from turbojax.configs import EngineConfig, GenerationConfig

# One config, whose programs are compiled once: seven pages, in which one sequence of the longest prompt fits.
SMALL = {
    "max_batch_size": 2, "max_prefill_token_num": 64, "cache_block_seq_len": 8, "session_len": 128,
    "num_decode_steps": 1, "cache_max_entry_count": 8,
}  # fmt: skip
GREEDY = GenerationConfig(max_new_tokens=16, ignore_eos=True)


@pytest.fixture
def golden(goldens):
    """Prompts and their recorded greedy continuations."""
    inputs, expected = (np.load(goldens / "llama_plain" / name) for name in ("inputs.npz", "expected.npz"))
    prompts = [inputs[f"{p}_ids"].tolist() for p in ("p17", "p40")]
    prompts += [row[:n].tolist() for row, n in zip(inputs["batch_ids"], inputs["batch_lens"], strict=True)]
    return prompts, [expected[f"{p}_gen_ids"].tolist() for p in ("p17", "p40")] + expected["batch_gen_ids"].tolist()


@pytest.mark.slow
def test_preempted_and_cached_requests_give_the_recorded_tokens(goldens, golden):
    """Two sequences grow from 3 pages each to 4 and 5, in 7 pages; the second call finds pages of the first."""
    prompts, want = ([found[i] for i in (0, -1)] for found in golden)
    with pipeline(goldens / "llama_plain", EngineConfig(**SMALL, tp=2)) as pipe:
        assert [r.token_ids for r in pipe(prompts, GREEDY)] == want
        assert pipe.metrics.num_preemptions > 0
        cached = pipe.metrics.num_cached_tokens
        assert pipe(prompts[-1], GREEDY).token_ids == want[-1]
        assert pipe.metrics.num_cached_tokens > cached
        assert pipe.metrics.num_failed_steps == 0


@pytest.mark.slow
def test_a_seed_and_rules_give_what_one_device_gives(goldens, golden):
    """The same noise: every device samples from the same logits, processed ones too."""
    prompts, _ = golden
    plain = GenerationConfig(do_sample=True, temperature=0.8, top_p=0.9, random_seed=3, max_new_tokens=8)
    ruled = GenerationConfig(do_sample=True, random_seed=4, repetition_penalty=1.2, logprobs=2, max_new_tokens=8)
    found = []
    for tp in (1, 2):
        with pipeline(goldens / "llama_plain", EngineConfig(**SMALL, tp=tp)) as pipe:
            found.append([pipe(prompts[0], plain), pipe(prompts[1], ruled)])
    assert [r.token_ids for r in found[0]] == [r.token_ids for r in found[1]]
    for one, two in zip(*(answers[1].logprobs for answers in found), strict=True):
        assert one.keys() == two.keys()
        np.testing.assert_allclose([*one.values()], [*two.values()], atol=1e-4)


def test_replicas_share_the_work(goldens, golden):
    prompts, want = golden
    with pipeline(goldens / "llama_plain", EngineConfig(**SMALL, tp=2, dp=2)) as pipe:
        assert pipe.max_batch_size == 4
        assert [r.token_ids for r in pipe(prompts, GREEDY)] == want
        each = [scheduler.metrics.num_finished_requests for scheduler in pipe._schedulers]
        assert sorted(each) == [2, 3]
        assert pipe.metrics.num_finished_requests == 5
        assert pipe.status.num_pages == 2 * 7
