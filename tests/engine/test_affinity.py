"""Who has the beginning of a prompt, and how much more than others they may have to do before that stops counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbojax.engine.affinity import (
    BLOCK_BYTES,
    HOLDERS_PER_BLOCK,
    MAX_BLOCKS,
    SLACK,
    PrefixTable,
    block_hashes,
    most_requests,
)


@given(st.binary(max_size=4 * BLOCK_BYTES), st.binary(max_size=2 * BLOCK_BYTES), st.binary(max_size=300))
def test_two_prompts_share_hashes_up_to_their_common_blocks(common, one, other):
    first, second = common + one, common + other
    num_common = 0
    while num_common < min(len(first), len(second)) and first[num_common] == second[num_common]:
        num_common += 1
    a, b = block_hashes("s", first), block_hashes("s", second)
    num_blocks = min(num_common // BLOCK_BYTES, len(a), len(b))
    assert a[:num_blocks] == b[:num_blocks]
    assert not set(a[num_blocks:]) & set(b[num_blocks:])


def test_no_more_than_so_much_of_a_prompt_is_looked_at():
    assert len(block_hashes("s", bytes(10 * MAX_BLOCKS * BLOCK_BYTES))) == MAX_BLOCKS


@pytest.mark.parametrize(("fewest", "most"), [(0, SLACK), (50, 2 * 50 + SLACK)])
def test_all_of_a_long_prompt_is_worth_twice_the_requests_and_some_and_less_of_it_less(fewest, most):
    assert most_requests(MAX_BLOCKS, fewest) == most
    assert most_requests(MAX_BLOCKS // 4, fewest) == fewest + (most - fewest) / 4
    assert most_requests(0, fewest) == fewest


def test_more_of_the_beginning_counts_more():
    table = PrefixTable()
    table.put((1, 2, 3), "long")
    table.put((1, 2), "short")
    assert table.find((1, 2, 3, 4), {"long": 0, "short": 0}) == "long"
    assert table.find((1, 2), {"long": 0, "short": 0}) == "short", "the one that had it last"
    assert table.find((1, 2, 3), {"short": 0, "other": 0}) == "short", "the long one is away"
    assert table.find((5,), {"long": 0, "short": 0}) is None


def test_of_those_that_have_as_much_the_least_busy_is_asked():
    table, hashes = PrefixTable(), tuple(range(MAX_BLOCKS))
    table.put(hashes, "a")
    table.put(hashes, "b")
    assert table.find(hashes, {"a": 4, "b": 5, "c": 0}) == "a"
    assert table.find(hashes, {"a": SLACK + 1, "b": SLACK + 1, "c": 0}) is None


def test_memory_is_bounded():
    table = PrefixTable(max_entries=100)
    for i in range(1000):
        table.put(block_hashes("s", b"%d" % i + b"x" * 3 * BLOCK_BYTES), i)
    assert len(table) <= 100
    for i in range(20):
        table.put((1,), i)
    found = [i for i in range(20) if table.find((1,), {i: 0}) == i]
    assert found == list(range(20 - HOLDERS_PER_BLOCK, 20))


def test_beginnings_in_use_outlive_others():
    table = PrefixTable(max_entries=10)
    table.put((1, 2), "kept")
    for i in range(100):
        table.put((100 + i,), "other")
        table.put((1,), "kept")
    assert table.find((1, 2), {"kept": 0, "other": 0}) == "kept"
