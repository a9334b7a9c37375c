"""Rules of logits against definitions written out token by token in float64, and log-probabilities without a sort."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbojax.batches import Batches, seen_by
from turbojax.core import logits as logits_module
from turbojax.core.logits import COUNT_LIMIT, counted, init_rules, joined, neutral_at, process
from turbojax.core.logprobs import largest, logprobs_of
from turbojax.engine.plan import SamplingParams, SlotJoin
from turbojax.processors import LogitsProcessor

NUM_VOCAB, NUM_SLOTS = 70, 3
NOTHING = np.full((1, 2), -1, np.int32)
EVERYTHING = np.full((1, 3), 0xFFFFFFFF, np.uint32)


def expected_row(logits, prompt, output, sampling, forbidden=(), allowed=None, processor=None):
    """By the definitions: transformers' repetition penalty, OpenAI's other two and bias, then bans."""
    row = np.asarray(logits, np.float64).copy()
    for token in range(len(row)):
        if token in prompt or token in output:
            p = sampling.repetition_penalty
            row[token] = row[token] * p if row[token] < 0 else row[token] / p
        times = list(output).count(token)
        row[token] -= times * sampling.frequency_penalty + (1 if times else 0) * sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        row[token] += bias
    if processor is not None:
        row = processor(row)
    for token in range(len(row)):
        if token in sampling.bad_token_ids or token in forbidden or (allowed is not None and token not in allowed):
            row[token] = -np.inf
    return row


def rules_of(*joins, processors=(), num_params=0):
    """Rules of the slots as the runner makes them, the sink's behind."""
    rules = init_rules(NUM_SLOTS + 1, NUM_VOCAB, 8, num_params)
    batches = Batches(NUM_SLOTS, 1, 1, 2, NUM_VOCAB, 8, num_params, processors)
    for call in batches.rules(joins):
        rules = jax.jit(joined)(rules, call)
    return rules


def join_of(slot, sampling, prompt=(), output=()):
    ids = np.asarray(prompt, np.int32), np.asarray(output, np.int32)
    return SlotJoin(slot, ((),), sampling, (), 99, prompt_ids=ids[0], output_ids=ids[1])


def row_of(rules, slot):
    return jax.tree.map(lambda leaf: leaf[slot : slot + 1], rules)


ids = st.lists(st.integers(0, NUM_VOCAB - 1), max_size=9)
sampling_params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -2.0]),
    logit_bias=st.dictionaries(st.integers(0, NUM_VOCAB - 1), st.floats(-100, 100, width=32), max_size=4).map(
        lambda d: tuple(d.items())
    ),
    bad_token_ids=ids.map(lambda tokens: tuple(set(tokens))[:4]),
)


@settings(deadline=None, max_examples=40)
@given(sampling_params, ids, ids, st.integers(0, 2**32 - 1), ids)
def test_rules_do_as_defined(sampling, prompt, output, seed, allowed):
    rng = np.random.default_rng(seed)
    row = rng.normal(0, 3, NUM_VOCAB).astype(np.float32)
    allowed = {*allowed, int(rng.integers(NUM_VOCAB))}
    masks = np.zeros((1, 3), np.uint32)
    for token in allowed:
        masks[0, token // 32] |= np.uint32(1 << token % 32)
    forbidden = np.array([[int(rng.integers(NUM_VOCAB)), -1]], np.int32)
    rules = rules_of(join_of(1, sampling, prompt, output))
    found = jax.jit(process)(row[None], row_of(rules, 1), forbidden, masks)[0]
    expected = expected_row(row, prompt, output, sampling, forbidden[0, :1], allowed)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)


def test_neutral_rules_change_no_bit():
    """Of slots that never had any, and of those that took the place of one that had; counts of the old one stay."""
    row = np.random.default_rng(0).normal(0, 9, (1, NUM_VOCAB)).astype(np.float32)
    row[0, :2] = -0.0, 0.0
    had = SamplingParams(
        repetition_penalty=3.0, presence_penalty=1.0, frequency_penalty=1.0, logit_bias=((1, 2.0),), bad_token_ids=(2,)
    )
    rules = neutral_at(rules_of(join_of(1, had, [1, 2], [1, 3])), jnp.asarray([1]))
    for slot in (0, 1):
        found = np.asarray(jax.jit(process)(row, row_of(rules, slot), NOTHING, EVERYTHING))
        np.testing.assert_array_equal(found.view(np.uint32), row.view(np.uint32))


def test_tokens_counted_one_by_one_are_those_of_a_recomputed_sequence():
    """Preemption counts prompt and output anew; the device had counted them as they came."""
    penal = SamplingParams(frequency_penalty=1.0)
    rng = np.random.default_rng(3)
    prompt, output = rng.integers(0, NUM_VOCAB, 30), rng.integers(0, NUM_VOCAB, 50)
    rules = rules_of(join_of(0, penal, prompt), join_of(2, penal, prompt[:5]))
    for token in output.tolist():
        at = jnp.asarray([0, NUM_SLOTS + 1, 2])  # the row between does not count
        rules = jax.jit(counted)(rules, at, jnp.asarray([token, 7, 9]))
    again = rules_of(join_of(1, penal, prompt, output), join_of(2, penal, prompt[:5], [9] * 50))
    np.testing.assert_array_equal(rules.counts[0], again.counts[1])
    np.testing.assert_array_equal(rules.counts[2], again.counts[2])
    assert (np.asarray(rules.counts[1]) == 0).all()


def test_counts_stop_at_their_limit():
    rules = rules_of(join_of(0, SamplingParams(frequency_penalty=1.0), [5], [5] * (COUNT_LIMIT + 3)))
    before = int(rules.counts[0, 5])
    assert before == COUNT_LIMIT + (1 << 15)
    assert int(counted(rules, jnp.asarray([0]), jnp.asarray([5])).counts[0, 5]) == before


def test_many_slots_and_many_tokens_take_several_calls(monkeypatch):
    from turbojax import batches

    monkeypatch.setattr(batches, "JOINS_PER_CALL", 2)
    monkeypatch.setattr(batches, "SEEN_PER_CALL", 16)
    rng = np.random.default_rng(4)
    joins = [
        join_of(slot, SamplingParams(presence_penalty=1.0), rng.integers(0, NUM_VOCAB, 40), rng.integers(0, 70, 40))
        for slot in range(3)
    ]
    rules = rules_of(*joins)
    for slot, join in enumerate(joins):
        expected = np.zeros(NUM_VOCAB, np.uint16)
        for token in join.output_ids:
            expected[token] += 1
        expected[np.unique(join.prompt_ids)] |= 1 << 15
        np.testing.assert_array_equal(rules.counts[slot], expected)
    assert len(seen_by(join_of(0, SamplingParams(logit_bias=((1, 1.0),)), [1]))) == 0, "nobody asks"


def test_a_processor_sees_its_own_rows_and_parameters():
    def push(logits, times, in_prompt, strength, table):
        return logits + strength * times.astype(jnp.float32) + jnp.where(in_prompt, table[0, 1], table[1, 0])

    processors = {
        "zero": LogitsProcessor(lambda logits, times, in_prompt: logits * 0),
        "push": LogitsProcessor(push, ((), (2, 2))),
    }
    table = np.array([[1, 2], [3, 4]], np.float32)
    rules = rules_of(
        join_of(0, SamplingParams(processor="push", processor_params=(0.5, table)), [1, 2], [3, 3]),
        join_of(1, SamplingParams(processor="zero", bad_token_ids=(4,))),
        processors=tuple(processors), num_params=5,
    )  # fmt: skip
    logits = np.random.default_rng(5).normal(0, 1, (NUM_SLOTS + 1, NUM_VOCAB)).astype(np.float32)
    run = jax.jit(functools.partial(process, processors=tuple(processors.values())))
    found = np.asarray(run(logits, rules, np.tile(NOTHING, (4, 1)), np.tile(EVERYTHING, (4, 1))))
    expected = logits.astype(np.float64)
    expected[0] += 3
    expected[0, [1, 2]] += 2 - 3
    expected[0, 3] += 0.5 * 2
    expected[1] = 0
    expected[1, 4] = -np.inf
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert processors["push"].num_params == 5


@pytest.mark.parametrize("num_vocab", [300, 2560, 5000])
def test_the_largest_are_those_of_a_sort(num_vocab):
    """Few different values: ties within and between chunks go to the lower id."""
    rng = np.random.default_rng(num_vocab)
    x = rng.integers(-3, 40, (5, num_vocab)).astype(np.float32)
    values, at = jax.jit(functools.partial(largest, k=20))(x)
    order = np.argsort(-x, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(at, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, 1))


def test_logprobs_are_those_of_float64():
    rng = np.random.default_rng(7)
    raw = rng.normal(0, 5, (4, 3000)).astype(np.float32)
    processed = np.where(rng.random(raw.shape) < 0.3, -np.inf, raw * 0.5).astype(np.float32)
    tokens = np.array([1, 2000, 2999, 0], np.int32)
    found = jax.jit(functools.partial(logprobs_of, k=7))(raw, processed, tokens)

    def log_softmax(x):
        x = x.astype(np.float64)
        return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)

    for logits, of_token, top in (
        (raw, found.of_token, found.top),
        (processed, found.processed_of_token, found.processed_top),
    ):
        expected = log_softmax(logits)
        np.testing.assert_allclose(of_token, expected[np.arange(4), tokens], atol=1e-5)
        np.testing.assert_allclose(top, np.take_along_axis(expected, np.asarray(found.top_ids), 1), atol=1e-5)
    np.testing.assert_array_equal(found.top_ids, np.argsort(-raw, axis=1)[:, :7])
    assert logits_module.IN_PROMPT > COUNT_LIMIT
