"""The engine on a real (small) model: one compilation a bucket, and the equalities through scheduler and runner."""

import numpy as np
import pytest

from turbojax.api import Pipeline
from turbojax.assembly import assemble
from turbojax.buckets import Buckets, StepShape
from turbojax.configs import EngineConfig, GenerationConfig

GREEDY = GenerationConfig(max_new_tokens=16)


def open_pipe(path, **config):
    # Few buckets, since each takes seconds to compile: 4 of decode, 2 of prefill, 1 mixed.
    defaults = {"max_batch_size": 2, "max_prefill_token_num": 32, "cache_block_seq_len": 16, "session_len": 128}
    parts = assemble(path, EngineConfig(**(defaults | config)))
    pipe = Pipeline(parts.runner, parts.scheduler, None, vocab_size=parts.model.spec.vocab_size, eos_ids=())
    return pipe, parts


@pytest.fixture(scope="module")
def model(goldens):
    return goldens / "llama_plain"


@pytest.fixture(scope="module")
def golden(model):
    """Prompts and their recorded greedy continuations."""
    inputs, expected = np.load(model / "inputs.npz"), np.load(model / "expected.npz")
    prompts = [inputs[f"{p}_ids"].tolist() for p in ("p17", "p40")]
    prompts += [row[:n].tolist() for row, n in zip(inputs["batch_ids"], inputs["batch_lens"], strict=True)]
    tokens = [expected[f"{p}_gen_ids"].tolist() for p in ("p17", "p40")] + expected["batch_gen_ids"].tolist()
    return prompts, tokens


@pytest.mark.slow
def test_no_trace_after_warm_up_over_a_mixed_load(model, golden):
    pipe, parts = open_pipe(model, compile_ahead=True)
    prompts, tokens = golden
    with pipe:
        warm = parts.runner.num_traces
        assert warm == len(list(parts.runner.buckets.all_shapes())) + 1, "each bucket once, and joining"
        responses = pipe(prompts * 3, GREEDY)
        sampled = GenerationConfig(max_new_tokens=9, do_sample=True, top_p=0.9, top_k=40, random_seed=3)
        pipe([p * 2 for p in prompts], [GREEDY, sampled] * (len(prompts) // 2) + [GREEDY] * (len(prompts) % 2))
        for prompt in prompts:
            pipe(prompt, sampled)
        assert parts.runner.num_traces == warm
    assert [r.token_ids for r in responses] == tokens * 3


@pytest.mark.parametrize(
    "config",
    [
        {"max_prefill_token_num": 16},  # chunked
        {"num_decode_steps": 1},
        {"cache_max_entry_count": 6},  # 5 pages of 16 tokens for two sequences of up to 4: they give way to each other
        {"max_batch_size": 1},
    ],
    ids=lambda c: next(iter(c)),
)
def test_every_way_to_run_gives_the_recorded_tokens(model, golden, config):
    prompts, tokens = golden
    pipe, parts = open_pipe(model, **config)
    with pipe:
        assert [r.token_ids for r in pipe(prompts, GREEDY)] == tokens
    parts.scheduler.check_integrity()


def test_a_seeded_request_is_the_same_alone_and_in_company(model, golden):
    prompts, _ = golden
    seeded = GenerationConfig(max_new_tokens=12, do_sample=True, temperature=1.0, top_k=0, random_seed=11)
    pipe, _ = open_pipe(model)
    with pipe:
        alone = pipe(prompts[0], seeded).token_ids
        together = pipe(prompts, seeded)[0].token_ids
        other = pipe(prompts[0], GenerationConfig(max_new_tokens=12, do_sample=True, top_k=0, random_seed=12)).token_ids
    assert alone == together
    assert alone != other


def test_buckets_cover_every_step_and_are_few_on_a_gpu():
    buckets = Buckets.of(max_batch_size=256, max_prefill_tokens=8192, num_decode_steps=8, min_prefill_tokens=128)
    shapes = list(buckets.all_shapes())
    assert len(set(shapes)) == len(shapes)
    for decode, tokens, chunks in [(1, 0, 0), (200, 0, 0), (0, 5, 1), (0, 8192, 8), (3, 129, 1), (256, 8192, 8)]:
        shape = buckets.shape_of(decode, tokens, chunks, 1)
        assert shape in shapes
        assert shape.num_decode_slots >= decode
        assert shape.num_prefill_tokens >= tokens
        assert shape.num_chunks >= chunks
    assert buckets.shape_of(1, 0, 0, 8) == StepShape(1, num_decode_steps=8)
    with pytest.raises(ValueError, match="257 exceeds"):
        buckets.shape_of(257, 0, 0, 1)
