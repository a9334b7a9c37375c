"""Ways to the same result that must agree, on the real default model, with lengths around a page edge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.harness import all_logits, chunks, decode, decode_batch, fresh, generate, mixed, prefill
from turbojax.core import steps
from turbojax.core.state import NO_TOKEN, init_sampler

PAGE_LEN, MAX_LEN, ATOL = 64, 256, 2e-3
LENGTHS = (PAGE_LEN - 1, PAGE_LEN, PAGE_LEN + 1)


@pytest.fixture(scope="module")
def prompts(smol):
    rng = np.random.default_rng(0)
    return [rng.integers(20, smol.spec.vocab_size, n).astype(np.int32) for n in LENGTHS]


def last_logits(model, parts, num_slots=3, **kwargs):
    """Logits behind the last token of each (slot, ids, history) part, all in one pass padded to one shape."""
    state = fresh(model.spec, num_slots=num_slots, page_len=PAGE_LEN, max_len=MAX_LEN, **kwargs)
    batch = chunks(*((slot, ids, 0, True) for slot, ids in parts), sink=num_slots, size=256, num_chunks=3)
    _, logits = all_logits(model.weights, state, batch, PAGE_LEN)
    return np.asarray(logits)[np.cumsum([len(ids) for _, ids in parts]) - 1]


def test_batched_equals_alone(smol, prompts):
    together = last_logits(smol, list(enumerate(prompts)))
    for i, ids in enumerate(prompts):
        np.testing.assert_allclose(last_logits(smol, [(i, ids)])[0], together[i], atol=ATOL, rtol=0)


def test_paged_equals_contiguous(smol, prompts):
    pages = 1 + np.random.default_rng(1).permutation(3 * MAX_LEN // PAGE_LEN).reshape(3, 1, -1)
    assert (np.diff(pages) != 1).any()
    parts = list(enumerate(prompts))
    np.testing.assert_array_equal(last_logits(smol, parts, pages=pages), last_logits(smol, parts))


@pytest.mark.parametrize("chunk_len", [PAGE_LEN, 17])
def test_chunked_equals_whole(smol, prompts, chunk_len):
    for ids in prompts:
        whole = last_logits(smol, [(0, ids)])[0]
        state = fresh(smol.spec, num_slots=3, page_len=PAGE_LEN, max_len=MAX_LEN)
        for begin in range(0, len(ids), chunk_len):
            part = ids[begin : begin + chunk_len]
            batch = chunks((0, part, begin, False), sink=3, size=64)
            state, logits = all_logits(smol.weights, state, batch, PAGE_LEN)
        np.testing.assert_allclose(np.asarray(logits)[len(part) - 1], whole, atol=ATOL, rtol=0)


@pytest.mark.slow
def test_several_steps_equal_single_steps(smol, prompts):
    for ids in prompts:
        runs = []
        for steps_per_call in (1, 4):
            state = fresh(smol.spec, num_slots=3, page_len=PAGE_LEN, max_len=MAX_LEN)
            runs.append(generate(smol.weights, state, ids, 9, steps_per_call=steps_per_call, size=128)[1])
        assert runs[0] == runs[1]


def test_decode_equals_prefill_of_the_same_tokens(smol, prompts):
    ids = prompts[0]
    state = fresh(smol.spec, num_slots=3, page_len=PAGE_LEN, max_len=MAX_LEN)
    _, tokens = generate(smol.weights, state, ids, 6, size=128)
    again = np.concatenate([ids, tokens[:-1]]).astype(np.int32)
    batch = chunks((0, again, 0, True), sink=3, size=256, num_chunks=3)
    _, logits = all_logits(smol.weights, state, batch, PAGE_LEN)
    rows = np.asarray(logits)[len(ids) - 1 : len(again)]
    top2 = np.sort(rows, axis=-1)[:, -2:]
    assert (top2[:, 1] - top2[:, 0] > 2 * ATOL).all(), "a near tie: choose another prompt"
    assert rows.argmax(-1).tolist() == tokens


@pytest.mark.slow
def test_mixed_step_equals_its_parts(smol, prompts):
    def ready():
        state = fresh(smol.spec, num_slots=3, page_len=PAGE_LEN, max_len=MAX_LEN)
        return prefill(smol.weights, state, chunks((0, prompts[0], 0, True), sink=3, size=128))[0]

    batch = chunks((1, prompts[1], 0, True), (2, prompts[2][:20], 0, False), sink=3, size=128)
    state, both = mixed(smol.weights, ready(), decode_batch([0, 3], 3), batch)
    state_apart, decoded = decode(smol.weights, ready(), decode_batch([0, 3], 3), num_steps=1)
    state_apart, prefilled = prefill(smol.weights, state_apart, batch)
    assert both.tolist() == [*decoded[0].tolist(), *prefilled.tolist()]
    assert both[1] == NO_TOKEN
    assert both[3] == NO_TOKEN
    for name in ("last_token", "length", "active"):
        got, want = getattr(state.slots, name), getattr(state_apart.slots, name)
        np.testing.assert_array_equal(got[:3], want[:3], err_msg=name)


def test_a_slot_stops_on_the_device(smol, prompts):
    ids = prompts[0]
    state = fresh(smol.spec, num_slots=3, page_len=PAGE_LEN, max_len=MAX_LEN)
    _, free = generate(smol.weights, state, ids, 8, steps_per_call=7, size=128)
    limit = fresh(smol.spec, num_slots=3, page_len=PAGE_LEN, max_len=MAX_LEN, max_lens=[len(ids) + 3] * 3)
    _, tokens = generate(smol.weights, limit, ids, 8, steps_per_call=7, size=128)
    assert tokens == free[:3] + [NO_TOKEN] * 5
    stop = next(t for t in free if t not in free[:1])
    stopping = state.replace(slots=state.slots.replace(stop_ids=state.slots.stop_ids.at[0, 0].set(stop)))
    _, tokens = generate(smol.weights, stopping, ids, 8, steps_per_call=7, size=128)
    cut = free.index(stop) + 1
    assert tokens == free[:cut] + [NO_TOKEN] * (8 - cut)


@pytest.mark.slow
def test_seeded_sampling_is_the_same_alone_and_in_a_batch(smol, prompts):
    seeded = init_sampler(3).replace(
        temperature=jnp.asarray([0.8, 0.0, 1.2], jnp.float32), seed=jnp.asarray([1, 2, 3], jnp.uint32)
    )
    make = lambda: fresh(smol.spec, num_slots=3, page_len=PAGE_LEN, max_len=MAX_LEN, sampler=seeded)
    parts = [(i, ids, 0, True) for i, ids in enumerate(prompts)]
    state, first = prefill(smol.weights, make(), chunks(*parts, sink=3, size=256))
    _, more = decode(smol.weights, state, decode_batch([0, 1, 2], 3), num_steps=5)
    together = np.concatenate([np.asarray(first)[None], np.asarray(more)]).T
    for i, part in enumerate(parts):
        state, first = prefill(smol.weights, make(), chunks(part, sink=3, size=256, num_chunks=3))
        _, more = decode(smol.weights, state, decode_batch([i, 3, 3], 3), num_steps=5)
        assert [int(first[0]), *np.asarray(more)[:, 0].tolist()] == together[i].tolist()


def test_the_pool_is_updated_in_place(smol):
    state = jax.eval_shape(lambda: fresh(smol.spec, num_slots=3, page_len=PAGE_LEN, max_len=1024))
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.pool))
    step = jax.jit(steps.decode, static_argnames="num_steps", donate_argnames="state")
    stats = step.lower(smol.weights, state, decode_batch([0, 1], 3), num_steps=2).compile().memory_analysis()
    assert stats.alias_size_in_bytes >= pool_bytes
    assert stats.temp_size_in_bytes < pool_bytes
