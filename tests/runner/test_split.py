"""What requests ask beside tokens, on a small model through the runner: rules of logits, masks, log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.harness import all_logits, chunks, fresh
from tests.core.test_logits import expected_row
from tests.runner.harness import SMALL
from turbojax.assembly import assemble_model
from turbojax.configs import EngineConfig, LogitsProcessor
from turbojax.engine.plan import PrefillChunk, SamplingParams, SlotJoin, StepPlan
from turbojax.errors import SlotError
from turbojax.models.model import load_model

PAGES_PER_SLOT = 8
NUM_NEW = 6
GREEDY = SamplingParams()
PROCESSORS = {
    "flip": LogitsProcessor(lambda logits, times, in_prompt: -logits),
    "avoid": LogitsProcessor(
        lambda logits, times, in_prompt, by: logits - by * (times.astype(jnp.float32) + in_prompt.astype(jnp.float32)),
        ((),),
    ),
}


@pytest.fixture(scope="module")
def loaded(model):
    return load_model(model, dtype="float32")


@pytest.fixture(scope="module")
def runner(loaded):
    """One for all tests: a join takes a slot anew."""
    config = EngineConfig(**SMALL, logits_processors=PROCESSORS)
    return assemble_model(loaded, config).runner


class Driver:
    """A sequence in a slot, step by step, without a scheduler."""

    def __init__(self, runner, slot, prompt, sampling=GREEDY, output=(), **wanted):
        self.runner, self.slot, self.wanted = runner, slot, wanted
        self.prompt, self.output = list(prompt), list(output)
        pages = tuple(range(1 + slot * PAGES_PER_SLOT, 1 + (slot + 1) * PAGES_PER_SLOT))
        known = {"prompt_ids": np.asarray(prompt, np.int32), "output_ids": np.asarray(output, np.int32)}
        self.join = SlotJoin(slot, (pages,), sampling, (), 128, admitted_len=len(prompt), **known, **wanted)

    def chunk(self, start, end, **wanted):
        known = self.prompt + self.output
        next_id = known[end] if end < len(known) else -1
        ids = np.asarray(known[start:end], np.int32)
        return PrefillChunk(self.slot, ids, start, end == len(known), next_token_id=next_id, **wanted)


def step(runner, *, decode=(), chunks=(), joins=(), masks=None, num_steps=1):
    plan = StepPlan(
        0, joins=tuple(d.join for d in joins), decode_slots=tuple(d.slot for d in decode), num_decode_steps=num_steps,
        max_decode_pages=PAGES_PER_SLOT, prefill_chunks=tuple(chunks),
    )  # fmt: skip
    handle = runner.dispatch(plan)
    if masks is not None:
        assert not handle.tokens, "it waits for masks"
        runner.pick(handle, masks)
    return runner.fetch(handle)


def prefill(driver, take=lambda result: None):
    """In chunks of 32."""
    known = len(driver.prompt) + len(driver.output)
    for start in range(0, known, 32):
        chunk = driver.chunk(start, min(start + 32, known))
        take(step(driver.runner, joins=[] if start else [driver], chunks=[chunk]))


def run(runner, *drivers, num_new=NUM_NEW):
    """Prefills each alone, then decodes all together: tokens and what came with them, by slot."""
    tokens, outputs = {d.slot: [] for d in drivers}, {d.slot: [] for d in drivers}

    def take(result):
        for slot, new in result.tokens.items():
            tokens[slot] += new
            if slot in result.outputs:
                outputs[slot].append(result.outputs[slot])

    for driver in drivers:
        prefill(driver, take)
    for _ in range(num_new - 1):
        take(step(runner, decode=drivers))
    return tokens, outputs


def reference_logits(loaded, ids):
    """float64 [T, V] of a whole sequence, by the pure forward pass."""
    state = fresh(loaded.spec, num_slots=1)
    batch = chunks((0, ids, 0, True), sink=1, size=64)
    return np.asarray(all_logits(loaded.weights, state, batch, 16)[1])[: len(ids)].astype(np.float64)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_a_plain_request_gives_the_recorded_tokens_whoever_is_beside_it(runner, golden):
    """Alone its steps are fused; beside one that wants more they are split."""
    (prompt, other, *_), tokens = golden
    expected = tokens[0][:NUM_NEW]
    seen = []
    program = runner._executables.step
    runner._executables.step = lambda shape: seen.append(shape) or program(shape)
    alone, _ = run(runner, Driver(runner, 0, prompt))
    assert [shape.is_fused for shape in seen] == [False] + [True] * (NUM_NEW - 1)
    seen.clear()
    rich = SamplingParams(frequency_penalty=1.0, bad_token_ids=(3,))
    together, outputs = run(runner, Driver(runner, 0, prompt), Driver(runner, 1, other, rich, num_logprobs=1))
    runner._executables.step = program
    assert not any(shape.is_fused for shape in seen)
    assert alone[0] == together[0] == expected
    assert not outputs[0]
    assert len(outputs[1]) == NUM_NEW


def test_seeded_tokens_are_the_same_fused_and_split(runner, golden):
    (prompt, *_), _ = golden
    hot = SamplingParams(temperature=1.3, top_k=50, top_p=0.95, seed=5, sample_index=2)
    fused, _ = run(runner, Driver(runner, 0, prompt, hot))
    split, _ = run(runner, Driver(runner, 0, prompt, hot, num_logprobs=0))
    other, _ = run(runner, Driver(runner, 0, prompt, SamplingParams(temperature=1.3, top_k=50, top_p=0.95, seed=5)))
    assert fused == split != other


def test_penalties_bias_and_processors_choose_as_their_definitions_do(runner, loaded, golden):
    """Greedy under each rule: the choice at every place, from the reference's logits of the same sequence."""
    (prompt, *_), tokens = golden
    count = lambda ids, size: np.bincount(ids, minlength=size)
    avoid = lambda prompt, output: lambda row: row - 2.5 * (count(output, len(row)) + (count(prompt, len(row)) > 0))
    cases = [
        (SamplingParams(repetition_penalty=1.8), None),
        (SamplingParams(presence_penalty=-9.0, frequency_penalty=0.5), None),
        (SamplingParams(logit_bias=((tokens[0][0], -100.0), (7, 2.0)), bad_token_ids=(tokens[0][1],)), None),
        (SamplingParams(processor="flip"), lambda prompt, output: lambda row: -row),
        (SamplingParams(processor="avoid", processor_params=(2.5,)), avoid),
    ]
    plain, _ = run(runner, Driver(runner, 0, prompt))
    for sampling, processor in cases:
        found, outputs = run(runner, Driver(runner, 0, prompt, sampling, num_logprobs=3))
        found = found[0]
        assert found != plain[0], sampling
        logits = reference_logits(loaded, prompt + found)[len(prompt) - 1 :]
        for i, token in enumerate(found):
            made = None if processor is None else processor(prompt, found[:i])
            row = expected_row(logits[i], prompt, found[:i], sampling, processor=made)
            assert row[token] >= row.max() - 1e-3, (sampling, i)
            got = outputs[0][i].logprobs[0]
            np.testing.assert_allclose(got.logprob, log_softmax(logits[i])[token], atol=1e-4)
            np.testing.assert_allclose(got.processed_logprob, log_softmax(row)[token], atol=1e-4)
            np.testing.assert_allclose(got.top_processed_logprobs, log_softmax(row)[got.top_ids], atol=1e-4)
            np.testing.assert_allclose(got.top_logprobs, np.sort(log_softmax(logits[i]))[::-1][:3], atol=1e-4)


def test_a_recomputed_request_goes_on_as_it_would_have(runner, golden):
    """Preempted behind any number of tokens: counts and random numbers are those of an undisturbed run."""
    (prompt, other, *_), _ = golden
    sampling = SamplingParams(
        temperature=1.0, seed=9, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.3, bad_token_ids=(1,)
    )
    whole, _ = run(runner, Driver(runner, 0, prompt, sampling))
    for num_before in (1, NUM_NEW - 1):
        before = whole[0][:num_before]
        run(runner, Driver(runner, 1, other, SamplingParams(frequency_penalty=2.0)), num_new=2)  # had the slot before
        again = Driver(runner, 1, prompt, sampling, output=before)
        rest, _ = run(runner, again, num_new=NUM_NEW - num_before)
        assert before + rest[1] == whole[0]


def test_prompt_logprobs_logits_and_hidden_states_of_chunks(runner, loaded, golden):
    """A prompt of 40 tokens in three chunks, in blocks of two rows, beside a slot that decodes."""
    (other, prompt, *_), _ = golden
    driver, beside = Driver(runner, 0, prompt), Driver(runner, 1, other)
    prefill(beside)
    wanted = {"num_prompt_logprobs": 2, "output_logits": True, "output_hidden": True}
    parts = []
    for start, end in ((0, 16), (16, 32), (32, 40)):
        joins = [] if start else [driver]
        result = step(runner, joins=joins, decode=[beside], chunks=[driver.chunk(start, end, **wanted)])
        parts.append(result.prompt_outputs[0])
        assert (len(result.tokens[1]), len(result.tokens[0])) == (1, end == 40)
    logits = reference_logits(loaded, prompt)
    np.testing.assert_allclose(np.concatenate([part.logits for part in parts]), logits, atol=1e-4)
    logprobs = [one for part in parts for one in part.logprobs]
    assert len(logprobs) == len(prompt) - 1, "nothing is known behind the last token"
    expected = log_softmax(logits)
    for row, one in enumerate(logprobs):
        np.testing.assert_allclose(one.logprob, expected[row, prompt[row + 1]], atol=1e-4)
        assert one.top_ids == np.argsort(-expected[row])[:2].tolist()
    hidden = np.concatenate([part.hidden for part in parts])
    assert hidden.shape == (len(prompt), loaded.spec.embed_dim)
    head = loaded.weights.embedding if loaded.weights.head is None else loaded.weights.head
    np.testing.assert_allclose(hidden @ np.asarray(head.weight[0]).T, logits, atol=1e-3)


def test_sampled_rows_bring_their_logits_and_hidden_states(runner, loaded, golden):
    (prompt, *_), tokens = golden
    found, outputs = run(runner, Driver(runner, 0, prompt, output_logits=True, output_hidden=True), num_new=3)
    assert found[0] == tokens[0][:3]
    logits = reference_logits(loaded, prompt + found[0])[len(prompt) - 1 : -1]
    np.testing.assert_allclose(np.concatenate([one.logits for one in outputs[0]]), logits, atol=1e-4)
    assert [one.hidden.shape for one in outputs[0]] == [(1, loaded.spec.embed_dim)] * 3
    assert outputs[0][0].logprobs is None


def test_masks_choose_and_others_do_not_notice(runner, loaded, golden):
    """A guided slot beside a plain one; the mask for a token is made after the tokens before it are known."""
    (prompt, other, *_), tokens = golden
    num_words = -(-loaded.spec.vocab_size // 32)
    guided, plain = Driver(runner, 0, prompt, has_guide=True), Driver(runner, 1, other)
    allowed, found = [[5, 9, 70], [200], [5, 255]], []

    def mask(ids):
        words = np.zeros(num_words, np.uint32)
        for token in ids:
            words[token // 32] |= np.uint32(1 << token % 32)
        return {0: words}

    beside = []
    prefill(plain, lambda result: beside.extend(result.tokens[1]))
    result = step(runner, joins=[guided], chunks=[guided.chunk(0, 16)])
    assert result.tokens[0] == [], "not its last chunk: no mask is waited for"
    result = step(runner, chunks=[guided.chunk(16, len(prompt))], decode=[plain], masks=mask(allowed[0]))
    found, beside = result.tokens[0], beside + result.tokens[1]
    for ids in allowed[1:]:
        result = step(runner, decode=[plain, guided], masks=mask(ids))
        found, beside = found + result.tokens[0], beside + result.tokens[1]
    assert beside == tokens[1][:4]
    logits = reference_logits(loaded, prompt + found)[len(prompt) - 1 :]
    for ids, token, row in zip(allowed, found, logits, strict=False):
        assert token == max(ids, key=lambda i: row[i])
    with pytest.raises(SlotError, match="mask of slot 0: none, accepted: uint32"):
        step(runner, decode=[plain, guided], masks={})


def test_several_tokens_a_call_are_refused_for_slots_that_are_not_plain(runner, golden):
    driver = Driver(runner, 0, golden[0][0], num_logprobs=0)
    prefill(driver)
    with pytest.raises(ValueError, match=r"4 tokens a call of slots \[0\]"):
        step(runner, decode=[driver], num_steps=4)


def test_states_of_split_steps_keep_their_place(runner, golden):
    """The pool, the counts and the hidden states are donated: no program makes new ones."""
    driver = Driver(runner, 0, golden[0][0], num_logprobs=0)
    prefill(driver)
    step(runner, decode=[driver])
    programs = runner._executables._programs
    assert len(programs) >= 4, "forward and pick of a chunk and of a decode step, beside those that move slots"
    kept = jax.tree.leaves((runner._state.pool, runner._state.slots.rules.counts, runner._state.hidden))
    for key, program in programs.items():
        assert program.memory_analysis().alias_size_in_bytes >= sum(leaf.nbytes for leaf in kept), key
