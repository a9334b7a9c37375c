"""Latencies and percentiles of token times that can be checked by hand."""

import pytest

from turbojax.bench.latency import Summary, Trace, latencies_ms


def test_the_latencies_of_one_request():
    trace = Trace(arrival_s=10.0, num_input_tokens=7, events=[(11.0, 1), (12.0, 2), (12.5, 1)])
    assert trace.num_output_tokens == 4
    assert trace.ttft_s == 1.0
    assert trace.e2e_s == 2.5
    assert trace.tpot_s == [0.5]
    assert trace.itl_s == [1.0, 0.0, 0.5], "two tokens came together"


def test_one_token_has_no_gaps():
    trace = Trace(0.0, 1, [(2.0, 1)])
    assert (trace.tpot_s, trace.itl_s) == ([], [])
    assert latencies_ms([trace]).keys() == {"ttft_ms", "e2e_ms"}


def test_percentiles_interpolate_between_neighbours():
    summary = Summary.of([30.0, 10.0, 20.0, 40.0, 50.0])
    assert summary == Summary(mean=30.0, p50=30.0, p95=pytest.approx(48.0), p99=pytest.approx(49.6))
    assert Summary.of([5.0]) == Summary(5.0, 5.0, 5.0, 5.0)
    assert Summary.of([]) is None


def test_latencies_are_in_milliseconds_over_all_requests():
    traces = [Trace(0.0, 1, [(0.1, 1), (0.3, 1)]), Trace(0.0, 1, [(0.3, 1), (0.7, 2)])]
    found = latencies_ms(traces)
    assert found["ttft_ms"] == pytest.approx({"mean": 200, "p50": 200, "p95": 290, "p99": 298})
    assert found["tpot_ms"]["mean"] == pytest.approx(200)
    assert found["itl_ms"] == pytest.approx({"mean": 200, "p50": 200, "p95": 380, "p99": 396})
    assert found["e2e_ms"]["mean"] == pytest.approx(500)
