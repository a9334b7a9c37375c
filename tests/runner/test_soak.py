"""The soak of scripts/soak.py, a small part of it."""

import pytest

from scripts.soak import Soak, soak


@pytest.mark.slow
def test_random_callers_leave_nothing_behind():
    """Prompts that begin alike, priorities, samples, time-outs, cancels and a small pool; see `soak` for what holds."""
    found = soak(num_calls=600, seconds=60, seed=1)
    assert found.num_done > 100
    assert found.counts["length"] > found.num_done / 4
    assert {"timeout", "left", "cancelled tasks"} <= found.counts.keys()


def test_memory_that_grows_is_noticed():
    flat, rising = Soak(rss_mb=[300.0, *[400.0] * 19]), Soak(rss_mb=[300.0 + 10 * i for i in range(20)])
    assert flat.growth_mb() == 0
    assert rising.growth_mb() == 450 - 390
    assert Soak(rss_mb=[1.0, 900.0]).growth_mb() == 0
