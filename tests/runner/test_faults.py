"""Steps of a real model that fail after their state was donated, and numbers that are not finite."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.runner.harness import GREEDY, open_pipe
from turbojax.core.diagnosis import first_bad_layer
from turbojax.errors import EngineFailedError
from turbojax.models.model import load_model
from turbojax.runner import JaxRunner

ONE_STEP = {"num_decode_steps": 1}
NUM_PAGES = 16  # of 16 tokens: they are used again and again


@pytest.fixture(scope="module")
def loaded(model):
    return load_model(model, dtype="float32")


def lose_state(runner, fails):
    """Lets a step run, then raises and leaves its state deleted, where `fails(plan, number of the step)`."""
    run, num_steps = runner._run, 0

    def failing(plan, shape):
        nonlocal num_steps
        tokens = run(plan, shape)
        num_steps += plan.step_id >= 0
        if plan.step_id >= 0 and fails(plan, num_steps - 1):
            jax.tree.map(lambda leaf: leaf.delete(), runner._state)
            raise RuntimeError("RESOURCE_EXHAUSTED: injected")
        return tokens

    runner._run = failing


def test_a_lost_step_disturbs_nobody(loaded, golden):
    prompts, tokens = golden
    pipe, parts = open_pipe(loaded, **ONE_STEP)
    lose_state(parts.runner, lambda plan, step: step in (0, 7, 40))
    with pipe:
        assert [r.token_ids for r in pipe(prompts, GREEDY)] == tokens
    parts.scheduler.check_integrity()
    assert parts.scheduler.metrics.num_failed_steps == 3
    assert parts.scheduler.pool.num_available_pages() == NUM_PAGES


def test_fresh_state_does_not_wait_for_who_holds_the_old_one(loaded):
    """A step that raises before it takes its state leaves it in the frames of the error."""
    pipe, parts = open_pipe(loaded, **ONE_STEP)
    held = jax.tree.leaves(parts.runner._state)
    parts.runner.reset()
    assert all(leaf.is_deleted() for leaf in held)
    parts.runner.reset()
    pipe.close()


def test_only_the_request_at_fault_ends_with_its_error(loaded, golden):
    prompts, tokens = golden
    pipe, parts = open_pipe(loaded, **ONE_STEP)
    poison = [5, 5, 5, 5]
    lose_state(parts.runner, lambda plan, _: any(c.token_ids[:4].tolist() == poison for c in plan.prefill_chunks))
    with pipe:
        *good, bad = pipe([*prompts, poison], GREEDY)
        assert [r.token_ids for r in good] == tokens
        assert bad.finish_reason == "error"
        assert "its step failed twice, the second time alone" in bad.error
        assert "injected" in bad.error
    parts.scheduler.check_integrity()


def test_a_lost_device_ends_everything_with_one_error(loaded, golden, monkeypatch):
    prompts, _ = golden
    pipe, parts = open_pipe(loaded, **ONE_STEP)

    def no_device(self):
        raise RuntimeError("no device")

    lose_state(parts.runner, lambda plan, step: step == 3)
    monkeypatch.setattr(JaxRunner, "reset", no_device)
    with pipe:
        responses = pipe(prompts, GREEDY)
        assert {r.finish_reason for r in responses} == {"error"}
        assert len({r.error for r in responses}) == 1
        with pytest.raises(EngineFailedError, match=r"the device is lost: .*injected.*no device"):
            pipe(prompts[0], GREEDY)


def test_a_token_whose_embedding_is_not_finite_fails_its_requests_alone(loaded, golden):
    """The others use the same pages later: what is left in them must not reach anybody."""
    prompts, tokens = golden
    used = {token for sequence in (*prompts, *tokens) for token in sequence}
    bad = next(token for token in range(1, loaded.spec.vocab_size) if token not in used)  # 0 pads steps
    table = loaded.weights.embedding
    broken = loaded.weights.replace(embedding=table.replace(weight=table.weight.at[0, bad, 3].set(jnp.nan)))
    pipe, parts = open_pipe(replace(loaded, weights=broken), **ONE_STEP)
    mixed = [prompt for p in prompts for prompt in ([*p[:20], bad, *p[:20]], p)]
    with pipe:
        responses = pipe(mixed * 2, GREEDY)
    for i, response in enumerate(responses):
        if i % 2:
            assert response.token_ids == tokens[i // 2 % len(tokens)]
        else:
            assert response.finish_reason == "error"
            assert "its logits are not finite behind" in response.error
    parts.scheduler.check_integrity()
    assert parts.scheduler.metrics.num_failed_steps == 0


@pytest.mark.parametrize("layer", [0, 1])
def test_debug_names_the_layer(loaded, golden, layer):
    (segment,) = loaded.weights.segments
    weight = segment.down.weight.at[layer, 5, 7].set(jnp.nan)
    broken = loaded.weights.replace(segments=(segment.replace(down=segment.down.replace(weight=weight)),))
    pipe, _ = open_pipe(replace(loaded, weights=broken), debug=True, num_decode_steps=1)
    with pipe:
        response = pipe(golden[0][0], GREEDY)
    assert response.finish_reason == "error"
    assert response.error.endswith(f": the first layer whose output is not finite is {layer} of 0 .. 1")


def test_embedding_and_head_are_told_apart_from_the_layers(loaded):
    tokens = np.array([3, 4, 5], np.int32)
    weights, bad = loaded.weights, jnp.float32(jnp.inf)
    assert first_bad_layer(weights, tokens) is None
    table, head = weights.embedding, weights.head
    assert (
        first_bad_layer(weights.replace(embedding=table.replace(weight=table.weight.at[0, 4, 0].set(bad))), tokens)
        == -1
    )
    bad_table = table.replace(weight=table.weight.at[0, 4, 0].set(bad))
    bad_head = head.replace(weight=head.weight.at[0, 9, 0].set(bad))
    assert first_bad_layer(weights.replace(embedding=bad_table), tokens) == -1
    assert first_bad_layer(weights.replace(head=bad_head), tokens) == 2


def test_debug_refuses_pages_outside_the_pool(loaded, golden):
    pipe, parts = open_pipe(loaded, debug=True, **ONE_STEP)
    parts.scheduler.pool._free[0].appendleft(99)
    parts.scheduler.pool._references[0] += [0] * 100
    with pipe:
        bad, good = pipe(golden[0][:2], GREEDY)
        assert bad.error == "page 99 of slot 0, accepted: 1 .. 16"
        assert good.token_ids == golden[1][1]
