"""The engine on a real (small) model: one compilation a bucket, and the equalities through scheduler and runner."""

import pytest

from tests.runner.harness import GREEDY, compilations, open_pipe
from turbojax import buckets as buckets_module
from turbojax.buckets import MAX_PROGRAMS, NUM_OTHER_PROGRAMS, Buckets, StepShape
from turbojax.configs import GenerationConfig

LONG = {"max_len": 131072, "page_len": 64}
GPU = {"max_batch_size": 256, "max_prefill_tokens": 8192, "min_prefill_tokens": 128, "split_slots": (16, 64),
       "pick_rows": (16,)}  # fmt: skip


@pytest.mark.slow
def test_nothing_is_traced_or_compiled_after_warm_up_over_a_mixed_load(model, golden):
    pipe, parts = open_pipe(model, compile_ahead=True)
    metrics, (prompts, tokens) = parts.scheduler.metrics, golden
    with pipe, compilations() as late:
        num_traces = metrics.num_traces  # none of those that are on disk already
        assert metrics.num_compilations == parts.runner.buckets.num_programs, "each program once"
        responses = pipe(prompts * 3, GREEDY)
        sampled = GenerationConfig(max_new_tokens=9, do_sample=True, top_p=0.9, top_k=40, random_seed=3)
        pipe([p * 2 for p in prompts], [GREEDY, sampled] * (len(prompts) // 2) + [GREEDY] * (len(prompts) % 2))
        for prompt in prompts:
            pipe(prompt, sampled)
        rich = {"logprobs": 2, "prompt_logprobs": 0, "output_logits": "all", "repetition_penalty": 1.2}
        for config in (rich, {"bad_token_ids": [3]}, {"output_last_hidden_state": "generation"}):
            pipe(prompts, [GREEDY, GenerationConfig(max_new_tokens=5, **config)] * 2 + [GREEDY] * (len(prompts) - 4))
        assert metrics.num_traces == num_traces <= metrics.num_compilations
        assert metrics.num_late_compilations == 0
        assert late == [], "XLA compiled something that is no step"
    assert [r.token_ids for r in responses] == tokens * 3
    for key, program in parts.runner._executables._programs.items():
        assert program.memory_analysis().alias_size_in_bytes >= parts.memory.pool_bytes, f"{key} copies the pool"


@pytest.mark.parametrize(
    "config",
    [
        {"max_prefill_token_num": 16, "cache_max_entry_count": 6},  # chunked; 5 pages for two sequences of up to 4
        {"num_decode_steps": 1},
    ],
    ids=" ".join,
)
def test_every_way_to_run_gives_the_recorded_tokens(model, golden, config):
    prompts, tokens = golden
    pipe, parts = open_pipe(model, **config)
    with pipe:
        assert [r.token_ids for r in pipe(prompts, GREEDY)] == tokens
    parts.scheduler.check_integrity()


def test_sequences_that_outgrow_narrow_tables_go_on_in_wide_ones(model, golden, monkeypatch):
    """Prompts of 11 to 40 tokens and 16 new ones: most pass 32 tokens, beside others that have not."""
    monkeypatch.setattr(buckets_module, "NARROW_LEN", 32)
    prompts, tokens = golden
    pipe, parts = open_pipe(model, num_decode_steps=2)
    used, program = set(), parts.runner._executables.step
    parts.runner._executables.step = lambda shape: used.add(shape) or program(shape)
    with pipe:
        assert [r.token_ids for r in pipe(prompts, GREEDY)] == tokens
    decodes = {(shape.table_len, shape.num_decode_steps, shape.is_split) for shape in used if not shape.num_chunks}
    assert decodes == {(2, 1, False), (2, 2, False), (None, 1, True)}


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


@pytest.mark.parametrize(
    "limits",
    [
        GPU,
        {"max_batch_size": 64, "max_prefill_tokens": 2048},  # a CPU's
        {"max_batch_size": 1, "max_prefill_tokens": 64},
        {"max_batch_size": 100, "max_prefill_tokens": 1000},
        {"max_batch_size": 1024, "max_prefill_tokens": 32768, "num_decode_steps": 16},
        GPU | LONG | {"max_batch_size": 257, "split_slots": (1, 16, 64)},
        GPU | LONG | {"split_slots": (1, 16, 64)},
        {"max_batch_size": 64, "max_prefill_tokens": 2048} | LONG,
        {"max_batch_size": 3, "max_prefill_tokens": 100, "max_len": 32769, "page_len": 16},
    ],
    ids=lambda limits: f"{limits['max_batch_size']}, {limits.get('max_len', 0)}",
)
def test_buckets_cover_every_step_and_are_few(limits):
    limits = {"num_decode_steps": 4} | limits
    num_steps, buckets = limits["num_decode_steps"], Buckets.of(**limits)
    shapes, picks = list(buckets.all_shapes()), list(buckets.all_picks())
    assert len(set(shapes) | set(picks)) == len(shapes) + len(picks) == buckets.num_programs - NUM_OTHER_PROGRAMS
    assert buckets.num_programs <= MAX_PROGRAMS
    slots, tokens = limits["max_batch_size"], limits["max_prefill_tokens"]
    used = set()
    for decode in {0, 1, 2, 17, 64, 65, slots - 1, slots}:
        most = max((most for size, most in buckets.mixed if size >= decode), default=tokens)
        assert tokens / 2 <= most <= tokens
        for num_tokens in {0, 1, 31, 33, 129, most, tokens}:
            for chunks in {0} if num_tokens == 0 else {1, 2, buckets.max_chunks}:
                if not 0 < decode + chunks <= slots or not chunks <= num_tokens <= tokens:
                    continue
                if num_tokens > most and (decode or chunks > 1):
                    continue
                for steps in {1} if chunks or decode > buckets.multi_step_slots[-1] else {1, num_steps}:
                    for num_pages in (1, buckets.narrow_table_len or 9, (buckets.narrow_table_len or 9) + 1):
                        narrow = buckets.narrow_table_len
                        if steps > 1 and narrow is not None and num_pages > narrow:
                            continue
                        shape = buckets.shape_of(decode, num_tokens, chunks, steps, num_pages)
                        assert shape in shapes
                        assert shape.num_decode_slots >= decode
                        assert shape.num_prefill_tokens >= num_tokens
                        assert shape.num_chunks >= chunks
                        assert shape.num_decode_steps == steps
                        assert shape.table_len is None or num_pages <= shape.table_len
                        used.add(shape)
                        assert shape.num_decode_slots + shape.num_prefill_tokens <= buckets.max_rows or shape.is_fused
    assert StepShape(0, buckets.prefill_tokens[-1], 1) in used
    for num_rows in {1, 2, 17, slots}:
        for is_plain in (True, False):
            if num_rows <= slots:
                pick = buckets.pick_of(num_rows, is_plain=is_plain)
                assert pick in picks
                assert (pick.num_rows >= num_rows) & (pick.is_plain == is_plain)
    with pytest.raises(ValueError, match=f"{slots + 1} exceeds"):
        buckets.shape_of(slots + 1, 0, 0, 1)
