"""Who may ask: keys and origins, over HTTP."""

from __future__ import annotations

import httpx
import pytest

from tests.serve.harness import fake_pipeline, service_on, serving
from tests.serve.ops.harness import COMPLETION, error_of
from turbojax.serve.app import create_app
from turbojax.serve.auth import Keys
from turbojax.serve.settings import ServeConfig

KEYS = ("sk-first-key", "sk-second-key-which-is-longer")
ORIGIN = "https://chat.example.com"


@pytest.fixture(scope="module")
def client():
    config = ServeConfig(server_port=0, api_keys=KEYS, allow_origins=(ORIGIN,))
    with (
        fake_pipeline() as pipe,
        serving(create_app(service_on(pipe, config))) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_every_key_opens(client, key, scheme):
    headers = {"Authorization": f"{scheme} {key}"}
    assert client.get("/v1/models", headers=headers).status_code == 200
    assert client.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200
    assert client.get("/metrics", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("sk-first-ke"),
        bearer("sk-first-keyy"),
        bearer("SK-FIRST-KEY"),
        {"Authorization": "Bearer"},
        bearer(" ".join(KEYS)),
        {"Authorization": KEYS[0]},
        {"Authorization": f"Basic {KEYS[0]}"},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/no/such/path"])
def test_nothing_else_does(client, headers, path):
    answer = client.get(path, headers=headers)
    assert error_of(answer) == (401, "invalid_api_key")
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_a_body_is_not_read_for_who_has_no_key(client):
    assert client.post("/v1/completions", content=b"{" * 100).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/"])
def test_probes_and_the_page_need_no_key(client, path):
    assert client.get(path).status_code == 200


def test_every_known_key_is_compared_whichever_is_right(monkeypatch):
    """No comparison is left out after one that succeeds."""
    compared = []
    monkeypatch.setattr("turbojax.serve.auth.hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    keys = Keys(KEYS)
    for key, knows in ((KEYS[0], True), (KEYS[1], True), ("sk-other", False)):
        compared.clear()
        assert keys.knows({"headers": [(b"authorization", f"Bearer {key}".encode())]}) is knows
        assert len(compared) == len(KEYS)
        assert {len(side) for pair in compared for side in pair} == {32}


def test_a_page_of_a_known_origin_may_call(client):
    ask = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    preflight = client.options(
        "/v1/completions", headers=ask | {"Access-Control-Request-Headers": "authorization,content-type"}
    )
    assert preflight.status_code == 200, "before it can present its key"
    assert preflight.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "authorization" in preflight.headers["Access-Control-Allow-Headers"]
    refused = client.post("/v1/completions", json=COMPLETION, headers={"Origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["Access-Control-Allow-Origin"] == ORIGIN, "or it could not see why"
    assert "X-Request-Id" in refused.headers["Access-Control-Expose-Headers"]


def test_a_page_of_another_origin_may_not(client):
    ask = {"Origin": "https://evil.example.com", "Access-Control-Request-Method": "POST"}
    assert client.options("/v1/completions", headers=ask).status_code == 400
    assert "Access-Control-Allow-Origin" not in client.get("/health", headers=ask).headers


def test_without_keys_nobody_is_asked_and_without_origins_no_page_may_call(fake_url):
    with httpx.Client(base_url=fake_url, timeout=60) as client:
        answer = client.get("/v1/models", headers={"Origin": ORIGIN})
        assert answer.status_code == 200
        assert "Access-Control-Allow-Origin" not in answer.headers
