"""What the proxy reads: URLs of nodes, bodies, headers; what it is told; and when a node may be asked."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbojax.errors import ConfigError
from turbojax.serve.openai_errors import ApiError
from turbojax.serve.proxy import headers, routing
from turbojax.serve.proxy.addresses import node_url
from turbojax.serve.proxy.ask import FIRST_MEAN_OUTPUT, MAX_SAMPLES, Ask, OutputLengths, read_ask
from turbojax.serve.proxy.health import FIRST_PAUSE_S, MAX_FAILURES, MAX_PAUSE_S, Health
from turbojax.serve.proxy.settings import STRATEGIES, ProxyConfig


@pytest.mark.parametrize(
    ("given", "known_as"),
    [
        ("http://127.0.0.1:23333", "http://127.0.0.1:23333"),
        ("HTTP://Node-1.Example:80/", "http://node-1.example"),
        ("https://api.example.com/v1", "https://api.example.com"),
        ("https://api.example.com:443/v1/", "https://api.example.com"),
        ("http://gateway/replica/1/v1/", "http://gateway/replica/1"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_node_has_one_url(given, known_as):
    assert node_url(given) == known_as
    assert node_url(known_as) == known_as


@pytest.mark.parametrize(
    "text",
    [
        "", "node:8000", "ftp://node", "file:///etc/passwd", "http://", "http:///v1", "http://user:pw@node",
        "http://@node", "http://node?x=1", "http://node?", "http://node/#a", "http://node#", "http://node:0", "http://node:99999",
        "http://node:x", "http://no de", "http://node\n", "http://nöde", "http://node/../admin", "http://a\\@b",
        "//node", "javascript:alert(1)", "http://[::1", None, 5,
    ],
)  # fmt: skip
def test_other_urls_are_refused(text):
    with pytest.raises(ConfigError, match=r"node\.url"):
        node_url(text)


class TestConfig:
    def test_nodes_are_known_once(self):
        assert ProxyConfig(["http://a/", "http://A/v1", "http://b"]).nodes == ("http://a", "http://b")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("nodes", "http://a"), ("nodes", ["a"]), ("routing_strategy", "best"), ("max_tries", 0),
            ("max_node_connections", True), ("connect_timeout_s", 0), ("idle_timeout_s", float("nan")),
            ("first_byte_timeout_s", "5"), ("health_interval_s", -1), ("node_api_key", ""), ("node_api_key", "a b"),
            ("admin_keys", ["short"]), ("admin_keys", "not-a-list-of-keys"),
        ],
    )  # fmt: skip
    def test_bad_values_are_named(self, field, value):
        with pytest.raises(ConfigError, match="url" if value == ["a"] else field):
            ProxyConfig(**{field: value})

    def test_every_strategy_has_its_name(self):
        assert tuple(routing.STRATEGIES) == STRATEGIES

    def test_keys_are_not_shown(self):
        config = ProxyConfig(admin_keys=["a-secret-key"], node_api_key="another-secret")
        assert "secret" not in repr(config)
        with pytest.raises(ConfigError) as raised:
            ProxyConfig(admin_keys=["a secret key"])
        assert "secret key" not in str(raised.value)


def ask_of(**fields: object) -> Ask:
    return read_ask(json.dumps({"model": "a", **fields}).encode(), OutputLengths(), generates=True)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
FIELDS = ("messages", "prompt", "tools", "cache_salt", "n", "max_tokens", "max_completion_tokens", "user", "stream")
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES)


class TestAsk:
    def test_work_is_prompt_and_answers(self):
        assert ask_of(max_tokens=10).output_work == 10
        assert ask_of(max_tokens=20, max_completion_tokens=10).output_work == 10
        assert ask_of(max_tokens=10, n=3).output_work == 30
        assert ask_of(max_tokens=10, prompt=["a", "b"], n=2).output_work == 40
        assert ask_of(max_tokens=10, prompt=[[1, 2], [3]]).output_work == 20
        assert ask_of(max_tokens=10, prompt=[1, 2, 3]).output_work == 10
        assert ask_of().output_work == ask_of(max_tokens=10**6).output_work == FIRST_MEAN_OUTPUT
        assert ask_of(prompt="x" * 64000).prompt_work > 900
        assert read_ask(b'{"input": "x"}', OutputLengths(), generates=False).output_work == 0

    @pytest.mark.parametrize("wrong", [-1, 0, True, "5", 1.5, 10**30, None, [], {}])
    def test_counts_that_a_node_will_refuse_do_not_upset_the_router(self, wrong):
        ask = ask_of(max_tokens=wrong, n=wrong, max_completion_tokens=wrong)
        assert ask.output_work == FIRST_MEAN_OUTPUT

    def test_samples_weigh_only_so_much(self):
        assert ask_of(max_tokens=1, n=10**9).output_work == MAX_SAMPLES

    @pytest.mark.parametrize(
        "body", [b"", b"{", b"[]", b"5", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000]
    )
    def test_bodies_that_are_no_objects_are_400(self, body):
        with pytest.raises(ApiError) as raised:
            read_ask(body, OutputLengths(), generates=True)
        assert raised.value.status == 400

    @pytest.mark.parametrize("model", [5, "", [], {}, True, "m" * 300])
    def test_models_that_are_no_names_are_400(self, model):
        with pytest.raises(ApiError) as raised:
            ask_of(model=model)
        assert (raised.value.status, raised.value.param) == (400, "model")

    @settings(deadline=None, max_examples=60)
    @given(BODIES)
    def test_any_object_is_read(self, body):
        ask = read_ask(json.dumps(body).encode(), OutputLengths(), generates=True)
        assert ask.work > 0
        assert isinstance(ask.prefix(), bytes)
        assert isinstance(ask.prefix_salt, str)

    def test_lone_surrogates_have_a_beginning_too(self):
        ask = read_ask(
            b'{"model": "\\ud800", "cache_salt": "\\udfff", "prompt": "\\ud800"}', OutputLengths(), generates=True
        )
        assert ask.prefix()
        assert ask.prefix_salt


def scope_of(*given: tuple[bytes, bytes]) -> dict[str, object]:
    return {"headers": list(given), "client": ("10.1.1.1", 5), "scheme": "https"}


class TestHeaders:
    def test_what_is_of_one_connection_stays_there(self):
        passed = headers.to_node(
            scope_of(
                (b"connection", b"close, X-Private"), (b"x-private", b"1"), (b"keep-alive", b"5"), (b"te", b"trailers"),
                (b"transfer-encoding", b"chunked"), (b"upgrade", b"h2c"), (b"host", b"proxy"),
                (b"content-length", b"5"),
                (b"proxy-authorization", b"x"), (b"accept", b"*/*"), (b"content-type", b"application/json"),
                (b"openai-organization", b"org"),
            ), "id", None,
        )  # fmt: skip
        assert dict(passed) == {
            "accept": "*/*", "content-type": "application/json", "openai-organization": "org", "X-Request-Id": "id",
            "X-Forwarded-For": "10.1.1.1", "X-Forwarded-Proto": "https",
        }  # fmt: skip

    def test_where_a_client_comes_from_is_not_its_to_say(self):
        forged = [(name, b"6.6.6.6") for name in (b"x-forwarded-for", b"forwarded", b"x-real-ip", b"x-forwarded-host")]
        passed = headers.to_node(scope_of(*forged), "id", None)
        assert "6.6.6.6" not in str(passed)

    def test_a_nodes_key_takes_the_place_of_the_clients(self):
        scope = scope_of((b"authorization", b"Bearer of-the-client"))
        assert headers.to_node(scope, "id", None).getall("Authorization") == ["Bearer of-the-client"]
        assert headers.to_node(scope, "id", "of-the-node").getall("authorization") == ["Bearer of-the-node"]

    def test_answers_keep_their_own_headers(self):
        raw = [
            (b"Server", b"x"), (b"Date", b"y"), (b"Connection", b"keep-alive"), (b"Transfer-Encoding", b"chunked"),
            (b"Content-Type", b"text/event-stream"), (b"X-Request-Id", b"other"), (b"Content-Encoding", b"gzip"),
            (b"Access-Control-Allow-Origin", b"*"),
        ]  # fmt: skip
        assert headers.to_client(raw) == [
            (b"content-type", b"text/event-stream"), (b"content-encoding", b"gzip"),
        ]  # fmt: skip


def health_of() -> Health:
    return Health(5.0, rng=random.Random(0))


class TestHealth:
    def test_a_node_is_not_asked_before_its_first_check(self):
        health = health_of()
        assert not health.is_up
        assert health.next_check_at == 0.0
        health.check_passed(3.0)
        assert health.is_up
        assert health.next_check_at == 8.0

    def test_pauses_double_up_to_a_limit_and_start_anew_after_an_answer(self):
        health, now_s, longest = health_of(), 0.0, FIRST_PAUSE_S
        for _ in range(12):
            health.check_failed(now_s, "in a test")
            assert longest / 2 <= health.next_check_at - now_s <= longest
            now_s, longest = health.next_check_at, min(2 * longest, MAX_PAUSE_S)
        health.check_passed(now_s)
        health.check_failed(now_s, "in a test")
        assert health.next_check_at - now_s >= MAX_PAUSE_S / 2, "a check is not an answer"
        health.check_passed(now_s)
        health.request_answered()
        health.check_failed(now_s, "in a test")
        assert health.next_check_at - now_s <= FIRST_PAUSE_S

    def test_one_failure_of_many_requests_counts_once(self):
        health = health_of()
        health.check_passed(0.0)
        for _ in range(100):
            health.unreachable(1.0, "in a test")
        assert health.num_downs == 1
        assert health.next_check_at <= 1.0 + FIRST_PAUSE_S

    def test_broken_requests_bring_a_check_at_once_and_down_when_they_repeat(self):
        health = health_of()
        health.check_passed(0.0)
        health.request_failed(1.0, "in a test")
        assert health.is_up
        assert health.next_check_at == 1.0
        health.request_answered()
        for _ in range(MAX_FAILURES - 1):
            health.request_failed(2.0, "in a test")
        assert health.is_up
        health.request_failed(2.0, "in a test")
        assert not health.is_up

    def test_time_alone_does_not_bring_a_node_back(self):
        health = health_of()
        health.check_failed(0.0, "in a test")
        health.request_failed(1e9, "in a test")
        health.request_answered()
        assert not health.is_up
