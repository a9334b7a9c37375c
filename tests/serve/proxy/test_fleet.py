"""The router's choices: what a lent node always is, and that there is one whenever there can be."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from turbojax.serve.openai_errors import ApiError
from turbojax.serve.proxy.ask import Ask
from turbojax.serve.proxy.fleet import Fleet
from turbojax.serve.proxy.routing import STRATEGIES

URLS = [f"http://10.0.0.{i}" for i in range(4)]
MODELS = ["a", "b"]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def fleet_of(strategy: str = "min_expected_latency", max_connections: int = 2) -> tuple[Fleet, Clock]:
    clock = Clock()
    return Fleet(STRATEGIES[strategy](), interval_s=5.0, max_connections=max_connections, clock=clock), clock


def up(fleet: Fleet, url: str, *models: str) -> None:
    """The node is there, and its check has passed."""
    node = fleet.get(url) or fleet.add(url)
    node.models = {name: {"id": name} for name in models}
    node.health.check_passed(fleet.clock())


def refusal(fleet: Fleet, ask: Ask) -> ApiError:
    with pytest.raises(ApiError) as raised:
        fleet.lease(ask)
    return raised.value


class Router(RuleBasedStateMachine):
    """Nodes come, go, fail and return while requests run; beside it a plain account of what must be true."""

    strategy = "min_expected_latency"

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[str] = []
        self.fleet, self.clock = fleet_of(self.strategy)
        self.fleet.on_gone = lambda node: self.gone.append(node.url)
        self.up: dict[str, set[str]] = {}  # present ones that are up, with their models
        self.present: set[str] = set()
        self.leases: list[tuple[str, object]] = []

    @rule(url=st.sampled_from(URLS))
    def add(self, url: str) -> None:
        was_kept = self.fleet.get(url) is not None
        node = self.fleet.add(url)
        self.present.add(url)
        assert not node.is_removed
        if not was_kept:
            assert not node.health.is_up, "nobody has checked it"
        elif node.health.is_up and node.models is not None:
            self.up[url] = set(node.models)

    @rule(url=st.sampled_from(URLS))
    def remove(self, url: str) -> None:
        num_running = sum(1 for where, _ in self.leases if where == url)
        node = self.fleet.remove(url)
        if node is not None:
            assert (self.fleet.get(url) is None) == (num_running == 0), "gone at once if and only if it has nothing"
        self.present.discard(url)
        self.up.pop(url, None)

    @rule(url=st.sampled_from(URLS), models=st.sets(st.sampled_from(MODELS)))
    def check_passes(self, url: str, models: set[str]) -> None:
        if self.fleet.get(url) is not None:
            up(self.fleet, url, *models)
            if url in self.present:
                self.up[url] = models

    @rule(url=st.sampled_from(URLS), how=st.sampled_from(["check_failed", "unreachable"]))
    def goes_down(self, url: str, how: str) -> None:
        node = self.fleet.get(url)
        if node is not None:
            getattr(node.health, how)(self.clock(), "in a test")
            assert not node.health.is_up
            self.up.pop(url, None)

    @rule(seconds=st.floats(0.01, 100))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(model=st.sampled_from([*MODELS, "none"]), tried=st.sets(st.sampled_from(URLS)), text=st.text(max_size=600))
    def ask(self, model: str, tried: set[str], text: str) -> None:
        running = {url: sum(1 for where, _ in self.leases if where == url) for url in URLS}
        open_ones = {
            url for url, models in self.up.items() if model in models and url not in tried and running[url] < 2
        }
        nodes = {node for url in tried if (node := self.fleet.get(url)) is not None}
        request = Ask(model, 1.0, 10.0, fields={"prompt": text})
        if not open_ones and not nodes:
            error = refusal(self.fleet, request)
            assert error.status in (404, 429, 503)
            assert error.status == 404 or int(error.headers["Retry-After"]) >= 1
            return
        lease = self.fleet.lease(request, nodes)
        if lease is None:
            assert not open_ones
        else:
            assert lease.node.url in open_ones
            self.leases.append((lease.node.url, lease))

    @rule(data=st.data(), is_whole=st.booleans(), num_tokens=st.integers(0, 50))
    def end(self, data: st.DataObject, is_whole: bool, num_tokens: int) -> None:
        if self.leases:
            url, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            self.clock.now_s += 0.1
            lease.answered()
            lease.generated(num_tokens)
            lease.end(is_whole)
            if url not in self.present and not any(where == url for where, _ in self.leases):
                assert self.fleet.get(url) is None, "removed, and its last request has ended"

    @invariant()
    def adds_up(self) -> None:
        for node in self.fleet:
            running = sum(1 for where, _ in self.leases if where == node.url)
            assert node.load.num_requests == running <= node.max_connections
            assert math.isfinite(node.load.outstanding)
            assert node.load.outstanding >= -1e-6
            assert running or node.load.outstanding == 0.0
            assert node.load.speed is None or node.load.speed > 0
        assert {node.url for node in self.fleet if not node.is_removed} == self.present
        names = {name for models in self.up.values() for name in models}
        assert set(self.fleet.models()) == names


LIMITS = settings(max_examples=25, stateful_step_count=40, deadline=None)
for _name in STRATEGIES:
    _machine = type(f"Router_{_name}", (Router,), {"strategy": _name})
    _machine.TestCase.settings = LIMITS
    globals()[f"TestRouter_{_name}"] = _machine.TestCase


def test_an_unknown_model_is_404_only_when_every_node_has_said_what_it_serves():
    fleet, _ = fleet_of()
    up(fleet, URLS[0], "a")
    error = refusal(fleet, Ask("c"))
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert "'c'" in error.message
    assert "a" in error.message
    fleet.add(URLS[1])  # not reached yet: it may have c
    assert refusal(fleet, Ask("c")).status == 503


def test_without_any_node_every_model_is_503():
    fleet, _ = fleet_of()
    assert refusal(fleet, Ask("a")).status == 503


def test_retry_after_is_when_the_first_node_that_has_the_model_is_checked_again():
    fleet, clock = fleet_of()
    for url in URLS[:2]:
        up(fleet, url, "a")
        fleet.get(url).health.check_failed(clock(), "in a test")
    fleet.get(URLS[0]).health.next_check_at = clock() + 7.2
    fleet.get(URLS[1]).health.next_check_at = clock() + 4.2
    error = refusal(fleet, Ask("a"))
    assert (error.status, error.headers["Retry-After"]) == (503, "5")


def test_full_nodes_are_429():
    fleet, _ = fleet_of(max_connections=1)
    up(fleet, URLS[0], "a")
    lease = fleet.lease(Ask("a"))
    error = refusal(fleet, Ask("a"))
    assert (error.status, error.code, error.headers["Retry-After"]) == (429, "nodes_full", "1")
    lease.end(True)
    fleet.lease(Ask("a")).end(True)


def test_a_body_without_a_model_goes_to_the_only_one():
    fleet, _ = fleet_of()
    up(fleet, URLS[0], "a")
    fleet.lease(Ask(None)).end(True)
    up(fleet, URLS[1], "b")
    error = refusal(fleet, Ask(None))
    assert (error.status, error.param) == (400, "model")
    assert "a, b" in error.message


def test_adding_a_node_again_changes_its_key_and_limit_and_keeps_what_it_has():
    fleet, _ = fleet_of()
    up(fleet, URLS[0], "a")
    lease = fleet.lease(Ask("a"))
    fleet.remove(URLS[0])
    node = fleet.add(URLS[0], "a-new-key", 7)
    assert node is lease.node
    assert (node.api_key, node.max_connections, node.is_removed, node.load.num_requests) == ("a-new-key", 7, False, 1)
    lease.end(True)
    assert fleet.get(URLS[0]) is node


def test_answers_tell_how_long_answers_are():
    fleet, _ = fleet_of()
    up(fleet, URLS[0], "a")
    before = fleet.outputs.mean("a")
    lease = fleet.lease(Ask("a", 1.0, 10.0, num_samples=2))
    lease.generated(20)
    lease.end(True)
    after_whole = fleet.outputs.mean("a")
    assert 10 < after_whole < before
    lease = fleet.lease(Ask("a", 1.0, 10.0))
    lease.generated(1)
    lease.end(False)  # cut short, so it says nothing
    assert fleet.outputs.mean("a") == after_whole


def test_no_key_is_shown():
    fleet, _ = fleet_of()
    node = fleet.add(URLS[0], "the-secret-key")
    assert "the-secret-key" not in repr(node)
    assert "the-secret-key" not in str(node.status())
    assert node.status()["has_api_key"] is True
