"""Ways to the same result that must agree, on the real default model, with lengths around a page edge.

All passes have one shape, and decode calls one of two: each takes seconds to compile.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.harness import all_logits, chunks, decode, decode_batch, fresh, mixed, prefill
from turbojax.core import steps
from turbojax.core.state import NO_TOKEN, init_sampler

PAGE_LEN, MAX_LEN, ATOL = 16, 64, 2e-3
LENGTHS = (PAGE_LEN - 1, PAGE_LEN, PAGE_LEN + 1)
SINK = NUM_SLOTS = 3


@pytest.fixture(scope="module")
def prompts(smol):
    rng = np.random.default_rng(0)
    return [rng.integers(20, smol.spec.vocab_size, n).astype(np.int32) for n in LENGTHS]


def new_state(model, **kwargs):
    return fresh(model.spec, num_slots=NUM_SLOTS, page_len=PAGE_LEN, max_len=MAX_LEN, **kwargs)


def pass_of(*parts):
    """(slot, ids, history, is_last) parts, padded to the one shape."""
    return chunks(*parts, sink=SINK, size=64, num_chunks=3)


def decoding(*slots):
    return decode_batch([*slots, *[SINK] * (3 - len(slots))], SINK)


def last_logits(model, parts, **kwargs):
    """Logits behind the last token of each (slot, ids) part, all in one pass."""
    batch = pass_of(*((slot, ids, 0, True) for slot, ids in parts))
    _, logits = all_logits(model.weights, new_state(model, **kwargs), batch, PAGE_LEN)
    return np.asarray(logits)[np.cumsum([len(ids) for _, ids in parts]) - 1]


def generate(model, state, ids, *, steps_per_call=4):
    """Nine greedy tokens in slot 0."""
    state, first = prefill(model.weights, state, pass_of((0, ids, 0, True)))
    tokens = [int(first[0])]
    while len(tokens) < 9:
        state, more = decode(model.weights, state, decoding(0), num_steps=steps_per_call)
        tokens += np.asarray(more)[:, 0].tolist()
    return tokens


def test_batched_equals_alone(smol, prompts):
    together = last_logits(smol, list(enumerate(prompts)))
    for i, ids in enumerate(prompts):
        np.testing.assert_allclose(last_logits(smol, [(i, ids)])[0], together[i], atol=ATOL, rtol=0)


def test_paged_equals_contiguous(smol, prompts):
    pages = 1 + np.random.default_rng(1).permutation(3 * MAX_LEN // PAGE_LEN).reshape(3, 1, -1)
    assert (np.diff(pages) != 1).any()
    parts = list(enumerate(prompts))
    np.testing.assert_array_equal(last_logits(smol, parts, pages=pages), last_logits(smol, parts))


@pytest.mark.parametrize("chunk_len", [PAGE_LEN, 7])
def test_chunked_equals_whole(smol, prompts, chunk_len):
    for ids in prompts:
        whole = last_logits(smol, [(0, ids)])[0]
        state = new_state(smol)
        for begin in range(0, len(ids), chunk_len):
            part = ids[begin : begin + chunk_len]
            state, logits = all_logits(smol.weights, state, pass_of((0, part, begin, False)), PAGE_LEN)
        np.testing.assert_allclose(np.asarray(logits)[len(part) - 1], whole, atol=ATOL, rtol=0)


@pytest.mark.slow
def test_several_steps_equal_single_steps(smol, prompts):
    for ids in prompts:
        four, one = (generate(smol, new_state(smol), ids, steps_per_call=n) for n in (4, 1))
        assert four == one


def test_decode_equals_prefill_of_the_same_tokens(smol, prompts):
    ids = prompts[0]
    tokens = generate(smol, new_state(smol), ids)
    again = np.concatenate([ids, tokens[:-1]]).astype(np.int32)
    _, logits = all_logits(smol.weights, new_state(smol), pass_of((0, again, 0, True)), PAGE_LEN)
    rows = np.asarray(logits)[len(ids) - 1 : len(again)]
    top2 = np.sort(rows, axis=-1)[:, -2:]
    assert (top2[:, 1] - top2[:, 0] > 2 * ATOL).all(), "a near tie: choose another prompt"
    assert rows.argmax(-1).tolist() == tokens


@pytest.mark.slow
def test_mixed_step_equals_its_parts(smol, prompts):
    def ready():
        return prefill(smol.weights, new_state(smol), pass_of((0, prompts[0], 0, True)))[0]

    batch = pass_of((1, prompts[1], 0, True), (2, prompts[2][:10], 0, False))
    state, both = mixed(smol.weights, ready(), decoding(0), batch)
    state_apart, decoded = decode(smol.weights, ready(), decoding(0), num_steps=1)
    state_apart, prefilled = prefill(smol.weights, state_apart, batch)
    assert both.tolist() == [*decoded[0].tolist(), *prefilled.tolist()]
    assert [int(token) != NO_TOKEN for token in both] == [True, False, False, True, False, False]
    for name in ("last_token", "length", "active"):
        got, want = getattr(state.slots, name), getattr(state_apart.slots, name)
        np.testing.assert_array_equal(got[:SINK], want[:SINK], err_msg=name)


def test_a_slot_stops_on_the_device(smol, prompts):
    ids = prompts[0]
    free = generate(smol, new_state(smol), ids)
    assert generate(smol, new_state(smol, max_lens=[len(ids) + 3] * 3), ids) == free[:3] + [NO_TOKEN] * 6
    stop, state = next(t for t in free if t not in free[:1]), new_state(smol)
    stopping = state.replace(slots=state.slots.replace(stop_ids=state.slots.stop_ids.at[0, 0].set(stop)))
    cut = free.index(stop) + 1
    assert generate(smol, stopping, ids) == free[:cut] + [NO_TOKEN] * (9 - cut)


@pytest.mark.slow
def test_seeded_sampling_is_the_same_alone_and_in_a_batch(smol, prompts):
    seeded = init_sampler(3).replace(
        temperature=jnp.asarray([0.8, 0.0, 1.2], jnp.float32), seed=jnp.asarray([1, 2, 3], jnp.uint32)
    )
    parts = [(i, ids, 0, True) for i, ids in enumerate(prompts)]
    state, first = prefill(smol.weights, new_state(smol, sampler=seeded), pass_of(*parts))
    _, more = decode(smol.weights, state, decoding(0, 1, 2), num_steps=4)
    together = np.concatenate([np.asarray(first)[None], np.asarray(more)]).T
    for i, part in enumerate(parts):
        state, first = prefill(smol.weights, new_state(smol, sampler=seeded), pass_of(part))
        _, more = decode(smol.weights, state, decoding(i), num_steps=4)
        assert [int(first[0]), *np.asarray(more)[:, 0].tolist()] == together[i].tolist()


def test_the_pool_is_updated_in_place(smol):
    state = jax.eval_shape(lambda: fresh(smol.spec, num_slots=3, page_len=64, max_len=1024))
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.pool))
    step = jax.jit(steps.decode, static_argnames="num_steps", donate_argnames="state")
    stats = step.lower(smol.weights, state, decode_batch([0, 1], 3), num_steps=2).compile().memory_analysis()
    assert stats.alias_size_in_bytes >= pool_bytes
    assert stats.temp_size_in_bytes < pool_bytes
