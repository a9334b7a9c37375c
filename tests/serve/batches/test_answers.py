"""What one request of a batch comes to when its route fails in a way that nobody expected."""

from __future__ import annotations

import asyncio

from turbojax.serve.batches import answers
from turbojax.serve.protocol.completions import CompletionRequest


def test_an_error_that_nobody_expected_is_in_the_log_and_its_kind_alone_in_the_answer(monkeypatch, caplog):
    async def fail(service, request):
        raise KeyError("what only the log may say")

    monkeypatch.setitem(answers.ROUTES, "/v1/completions", (CompletionRequest, fail))
    got = asyncio.run(answers.answer(None, "/v1/completions", {"model": "m", "prompt": "a"}, priority=0))
    assert (got.status, got.body["error"]["code"]) == (500, "internal_error")
    assert "only the log" not in str(got.body)
    assert "only the log" in caplog.text
