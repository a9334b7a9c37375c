"""The window in which a batch decodes as one, driven by hand."""

import pytest

from turbojax.bench import steady
from turbojax.bench.errors import BenchError
from turbojax.bench.steady import Window
from turbojax.engine.request import Progress

CONTEXT = 100


@pytest.fixture
def clock(monkeypatch):
    """The time, which a test sets."""
    now = [0.0]
    monkeypatch.setattr(steady.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(steady, "WARM_UP_STEPS", 3)
    return now


def run(window, clock, batch, num_tokens_per_call, seconds_per_call):
    """Sequence i joins at call i; every call brings tokens to all that joined, and the first one's comes alone."""
    sinks = [window.sink_of(i) for i in range(batch)]
    ended, call = set(), 0
    while len(ended) < batch:
        for i in range(min(batch, call + 1)):
            if i not in ended:
                count = 1 if call == i else num_tokens_per_call
                if sinks[i](Progress([7] * count)):
                    ended.add(i)
        clock[0] += seconds_per_call
        call += 1
    assert window.ended.is_set()
    return window.result()


@pytest.mark.parametrize("num_tokens_per_call", [1, 2])
def test_it_counts_whole_calls_of_the_whole_batch(clock, num_tokens_per_call):
    found = run(Window(3, CONTEXT, num_steps=8), clock, 3, num_tokens_per_call, seconds_per_call=0.5)
    assert found.num_tokens == 3 * 8
    assert found.num_steps == 8
    assert found.seconds == 8 / num_tokens_per_call * 0.5


def test_lengths_are_those_midway(clock):
    found = run(Window(2, CONTEXT, num_steps=4), clock, 2, 1, 1.0)
    # The last to join has its 4th token when the window opens and its 8th when it closes; the other is one ahead.
    assert found.lengths == [CONTEXT + 7, CONTEXT + 6]


def test_a_sequence_that_ends_early_or_fails_spoils_it(clock):
    window = Window(2, CONTEXT, num_steps=4)
    first, second = window.sink_of(0), window.sink_of(1)
    assert not first(Progress([1]))
    assert first(Progress([1], "length"))
    assert not window.ended.is_set()
    assert second(Progress([], "error", ValueError("broken")))
    assert window.ended.is_set()
    with pytest.raises(BenchError, match=r"never decoded as one.*ended early \(length\)"):
        window.result()
