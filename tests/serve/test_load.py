"""The load of scripts/load_server.py, a part of it, on an engine without a device."""

import asyncio

import pytest

from scripts.load_server import KINDS, Answer, Clients, Load, leftovers, load_server
from tests.pipeline.harness import wait_until_idle
from tests.serve import harness
from turbojax.serve.app import create_app

LETTERS = "ABCDEFG"


@pytest.fixture
def service():
    with harness.fake_pipeline(num_slots=16, num_pages=2000, session_len=600) as pipe:
        yield harness.service_on(pipe)
        assert wait_until_idle(pipe)


def test_clients_that_behave_as_they_like_leave_nothing_behind(service):
    """300 requests, 64 at a time: slow readers, clients that leave, and whole answers that are right."""
    with harness.serving(create_app(service)) as url:
        load = load_server(f"{url}/v1", service, LETTERS, 300, seed=1)
    assert load.wrong == []
    assert load.kinds.keys() == KINDS.keys()
    assert load.kinds.total() == 300
    num_heard = 300 - load.kinds["leaves"] - load.kinds["goes"] - load.kinds["half"]
    assert load.statuses == {200: num_heard}
    # Every call of the engine ended; of the clients that went at once some were never read.
    assert num_heard <= len(load.generations) <= 300 - load.kinds["half"]
    service.pipe._scheduler.check_integrity()


def test_what_is_left_is_noticed(service):
    assert leftovers(service) == []
    stream = service.pipe.stream_infer([1, 2, 3])
    next(stream)
    found = leftovers(service, timeout_s=0)
    assert any(one.endswith("pages held") for one in found)
    assert "1 running" in found
    stream.close()


def test_a_wrong_answer_is_noticed():
    def stream(*events):
        lines = "".join(f"data: {event}\n\n" for event in events).encode()
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        return Answer.of(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(lines), lines))

    end, usage = '{"choices": [{"finish_reason": "length"}]}', '{"choices": [], "usage": {"completion_tokens": 5}}'
    assert stream(end, usage, "[DONE]").fault(5, 1, streams=True) is None
    assert "4 for each" in stream(end, usage, "[DONE]").fault(4, 1, streams=True)
    assert "1 choices ended with ['length', 'length']" in stream(end, end, usage, "[DONE]").fault(5, 1, streams=True)
    assert "last event" in stream(end, usage).fault(5, 1, streams=True)
    assert "an error" in stream('{"error": {}}', "[DONE]").fault(5, 1, streams=True)
    assert "status 429" in Answer.of(b"HTTP/1.1 429 Too Many\r\n\r\nbusy").fault(5, 1, streams=False)


def test_a_server_that_is_not_there_is_noticed():
    load = asyncio.run(Clients("http://127.0.0.1:9/v1", "tiny", LETTERS, 0).run(3))
    assert len(load.wrong) == 3
    assert "ConnectionRefusedError" in load.wrong[0]


def test_memory_that_grows_is_noticed():
    assert Load(rss_mb=[300.0, *[400.0] * 19]).growth_mb() == 0
    assert Load(rss_mb=[300.0 + 10 * i for i in range(20)]).growth_mb() == 450 - 390
