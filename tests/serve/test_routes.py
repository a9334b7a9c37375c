"""What a client is told that asks at no route, or does not say that its body is JSON."""

from __future__ import annotations

import httpx
import pytest


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/chat/completions", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/v1/completions/", 404)],
)
def test_what_is_no_route_is_named(fake_url, method, path, status):
    answer = httpx.request(method, fake_url + path, json={}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, "no_such_route")
    assert f"{method} {path}" in error["message"]
    assert "/v1" in error["message"]
    assert answer.headers.get("allow") == ("POST" if status == 405 else None)


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
def test_a_body_that_does_not_say_that_it_is_json_is_told_how(fake_url, kind):
    answer = httpx.post(
        f"{fake_url}/v1/completions", content=b'{"model": "tiny"}', headers={"Content-Type": kind}, timeout=60
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (415, "unsupported_media_type")
    assert "Content-Type: application/json" in error["message"]
