"""What comes back is what was sent; nothing else comes in."""

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbojax.distributed import wire
from turbojax.engine.plan import PageCopy, PageGrant, PrefillChunk, SamplingParams, SlotJoin, StepPlan
from turbojax.errors import ClusterError

NUMBERS = st.integers(0, 2**31 - 1)
TUPLES = st.lists(NUMBERS, max_size=4).map(tuple)
TOKENS = TUPLES.map(lambda ids: np.asarray(ids, np.int32))
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    seed=st.integers(0, 2**32 - 1),
    logit_bias=st.lists(st.tuples(NUMBERS, st.floats(-100, 100)), max_size=3).map(tuple),
    bad_token_ids=TUPLES,
    processor=st.none() | st.text(),
    processor_params=st.tuples(st.floats(-1, 1), TOKENS.map(lambda ids: ids.astype(np.float32).reshape(1, -1))),
)
JOINS = st.builds(
    SlotJoin,
    NUMBERS,
    st.tuples(TUPLES),
    SAMPLING,
    TUPLES,
    NUMBERS,
    has_guide=st.booleans(),
    prompt_ids=st.none() | TOKENS,
)
CHUNKS = st.builds(PrefillChunk, NUMBERS, TOKENS, NUMBERS, st.booleans(), st.none() | NUMBERS, st.just(-1))
PLANS = st.builds(
    StepPlan,
    NUMBERS,
    TUPLES,
    st.lists(st.builds(PageCopy, NUMBERS, NUMBERS, NUMBERS), max_size=2).map(tuple),
    st.lists(JOINS, max_size=2).map(tuple),
    st.lists(st.builds(PageGrant, NUMBERS, NUMBERS, NUMBERS), max_size=2).map(tuple),
    TUPLES,
    prefill_chunks=st.lists(CHUNKS, max_size=2).map(tuple),
)


def assert_same(found, sent):
    assert type(found) is type(sent)
    if dataclasses.is_dataclass(sent):
        for field in dataclasses.fields(sent):
            assert_same(getattr(found, field.name), getattr(sent, field.name))
    elif isinstance(sent, tuple):
        assert len(found) == len(sent)
        for one, other in zip(found, sent, strict=True):
            assert_same(one, other)
    elif isinstance(sent, np.ndarray):
        assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
        np.testing.assert_array_equal(found, sent)
    else:
        assert found == sent


@given(PLANS)
def test_a_plan_comes_back_as_it_was(plan):
    assert_same(wire.decode(wire.encode(plan)), plan)


@given(st.dictionaries(NUMBERS, st.lists(NUMBERS, max_size=3).map(lambda m: np.asarray(m, np.uint32)), max_size=3))
def test_masks_come_back_by_slot(masks):
    found = wire.decode(wire.encode(masks))
    assert list(found) == list(masks)
    for slot, mask in masks.items():
        assert_same(found[slot], mask)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_refused(data):
    with contextlib.suppress(ClusterError):
        assert wire.encode(wire.decode(data)) is not None


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_message_that_was_cut_is_refused(cut):
    with pytest.raises(ClusterError, match="cannot be read"):
        wire.decode(wire.encode(StepPlan(3, decode_slots=(1, 2), num_decode_steps=4))[:-cut])


def test_a_plan_with_a_field_too_few_is_refused():
    short = {wire.KIND: wire.CODES[PageCopy], wire.VALUES: (1, 2)}
    with pytest.raises(ClusterError, match="PageCopy has 3 fields, not 2"):
        wire.decode(wire.encode(short))
    with pytest.raises(ClusterError, match="dataclass 99 is unknown"):
        wire.decode(wire.encode(short | {wire.KIND: 99}))


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros(2, complex), np.array([object()])])
def test_what_is_no_plain_data_is_not_sent(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        wire.encode(value)


def test_a_message_is_bounded(monkeypatch):
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 100)
    with pytest.raises(ClusterError, match="has 105 bytes; accepted: at most 100"):
        wire.framed(bytes(103))
