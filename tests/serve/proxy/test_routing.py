"""Strategies: each against what it promises."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.serve.proxy.test_fleet import URLS, fleet_of
from turbojax.engine.affinity import SLACK, block_hashes
from turbojax.serve.proxy.ask import Ask
from turbojax.serve.proxy.load import HALF_LIFE_S, Load
from turbojax.serve.proxy.node import Node
from turbojax.serve.proxy.routing import LeastLatency, PrefixAffinity, Random, RoundRobin


def nodes_of(number: int) -> list[Node]:
    fleet, _ = fleet_of()
    return [fleet.add(url) for url in URLS[:number]]


def worked(node: Node, tokens: float, seconds: float) -> None:
    """It has done this much in this time, and is idle again."""
    start_s = node.load._seen_at
    node.load.begin(start_s, tokens)
    node.load.do(tokens, tokens)
    node.load.end(start_s + seconds, 0.0)


def busy(node: Node, num_requests: int, work: float = 10.0) -> None:
    for _ in range(num_requests):
        node.load.begin(node.load._seen_at, work)


def prompt(text: str, model: str = "a", **fields: object) -> Ask:
    return Ask(model, 1.0, 10.0, fields={"prompt": text, **fields})


class TestRoundRobin:
    @given(st.integers(1, 4), st.integers(1, 40))
    def test_turns_differ_by_one_at_most(self, number, rounds):
        nodes, strategy = nodes_of(number), RoundRobin()
        turns = Counter(strategy.choose(nodes, prompt("")).url for _ in range(rounds))
        assert max(turns.values()) - min(turns[node.url] for node in nodes) <= 1

    def test_a_node_that_was_away_is_not_made_to_catch_up(self):
        nodes, strategy = nodes_of(2), RoundRobin()
        for _ in range(10):
            strategy.choose(nodes[:1], prompt(""))
        turns = Counter(strategy.choose(nodes, prompt("")).url for _ in range(10))
        assert set(turns.values()) == {5}


def test_random_uses_all_nodes_alike():
    nodes, strategy = nodes_of(4), Random(random.Random(1))
    turns = Counter(strategy.choose(nodes, prompt("")).url for _ in range(4000))
    assert all(850 < turns[node.url] < 1150 for node in nodes)  # five standard deviations


class TestLeastLatency:
    def test_equal_nodes_share_what_comes(self):
        nodes, strategy = nodes_of(4), LeastLatency()
        for _ in range(40):
            busy(strategy.choose(nodes, prompt("")), 1)
        assert [node.load.num_requests for node in nodes] == [10] * 4

    def test_requests_one_after_the_other_are_shared_too(self):
        nodes, strategy = nodes_of(4), LeastLatency()
        turns = Counter(strategy.choose(nodes, prompt("")).url for _ in range(40))
        assert set(turns.values()) == {10}

    def test_a_node_four_times_as_fast_gets_four_times_as_much(self):
        nodes, strategy = nodes_of(2), LeastLatency()
        worked(nodes[0], 4000, 10.0)
        worked(nodes[1], 1000, 10.0)
        for _ in range(100):
            busy(strategy.choose(nodes, prompt("")), 1, 11.0)
        assert 78 <= nodes[0].load.num_requests <= 82

    def test_long_answers_weigh_more_than_many_short_ones(self):
        nodes, strategy = nodes_of(2), LeastLatency()
        busy(nodes[0], 1, 1000.0)
        busy(nodes[1], 5, 10.0)
        assert strategy.choose(nodes, prompt("")) is nodes[1]

    def test_a_new_node_counts_as_fast_as_the_fastest(self):
        nodes, strategy = nodes_of(3), LeastLatency()
        worked(nodes[0], 100, 10.0)
        worked(nodes[1], 1000, 10.0)
        busy(nodes[1], 1, 5.0)
        assert strategy.choose(nodes, prompt("")) is nodes[2]

    @given(st.lists(st.tuples(st.floats(1, 1e4), st.integers(0, 20)), min_size=1, max_size=4))
    def test_nobody_would_have_been_quicker(self, states):
        nodes = nodes_of(len(states))
        for node, (speed, num_requests) in zip(nodes, states, strict=True):
            worked(node, speed, 1.0)
            busy(node, num_requests)
        chosen, ask = LeastLatency().choose(nodes, prompt("")), prompt("")
        expected = [node.load.expected_s(ask.work, node.load.speed) for node in nodes]
        assert chosen.load.expected_s(ask.work, chosen.load.speed) == min(expected)


class TestPrefixAffinity:
    text = "You are a helpful assistant. " * 40  # 4 whole blocks

    def test_the_same_beginning_goes_to_the_same_node(self):
        nodes, strategy = nodes_of(4), PrefixAffinity()
        first = strategy.choose(nodes, prompt(self.text + "one"))
        for end in ("two", "three", "four" * 500):
            assert strategy.choose(nodes, prompt(self.text + end)) is first

    def test_other_beginnings_go_round(self):
        nodes, strategy = nodes_of(4), PrefixAffinity()
        chosen = {strategy.choose(nodes, prompt(f"{i} {self.text}")).url for i in range(4)}
        assert len(chosen) == 4

    def test_a_conversation_stays_where_it_began(self):
        nodes, strategy = nodes_of(4), PrefixAffinity()
        messages = [{"role": "system", "content": self.text}, {"role": "user", "content": "hi " * 100}]
        first = strategy.choose(nodes, Ask("a", fields={"messages": messages}))
        for turn in range(3):
            messages = [*messages, {"role": "assistant", "content": f"{turn}"}, {"role": "user", "content": "more"}]
            assert strategy.choose(nodes, Ask("a", fields={"messages": messages})) is first

    def test_a_node_with_much_more_to_do_is_passed_over_and_another_learns_the_beginning(self):
        nodes, strategy = nodes_of(2), PrefixAffinity()
        book = self.text * 32
        first = strategy.choose(nodes, prompt(book))
        other = nodes[1 - nodes.index(first)]
        busy(first, SLACK)
        assert strategy.choose(nodes, prompt(book)) is first
        busy(first, 1)
        assert strategy.choose(nodes, prompt(book)) is other
        assert strategy.choose(nodes, prompt(book)) is other, "both have it now, and one has less to do"

    def test_a_node_that_is_away_is_no_reason_to_fail(self):
        nodes, strategy = nodes_of(2), PrefixAffinity()
        first = strategy.choose(nodes, prompt(self.text))
        rest = [node for node in nodes if node is not first]
        assert strategy.choose(rest, prompt(self.text)) is rest[0]

    def test_salts_and_models_are_apart_and_users_are_not(self):
        plain = prompt(self.text)
        hashes = block_hashes(plain.prefix_salt, plain.prefix())
        for other in (prompt(self.text, cache_salt="s"), prompt(self.text, model="b")):
            assert not set(hashes) & set(block_hashes(other.prefix_salt, other.prefix()))
        same = prompt(self.text, user="somebody")
        assert block_hashes(same.prefix_salt, same.prefix()) == hashes

    def test_tools_come_before_the_messages(self):
        messages = [{"role": "user", "content": self.text}]
        with_tools = Ask("a", fields={"messages": messages, "tools": [{"name": "f"}]})
        assert with_tools.prefix().startswith(b'[{"name": "f"}]')


class TestLoad:
    def test_latency_is_work_over_speed(self):
        load = Load()
        load.begin(0.0, 100.0)
        load.do(100.0, 100.0)
        load.end(2.0, 0.0)
        assert load.speed == 50.0
        load.begin(10.0, 30.0)
        assert load.expected_s(20.0, load.speed) == 1.0

    def test_time_without_work_is_not_counted(self):
        load = Load()
        for start_s in (0.0, 1000.0):
            load.begin(start_s, 10.0)
            load.do(10.0, 10.0)
            load.end(start_s + 1.0, 0.0)
        assert abs(load.speed - 10.0) < 1e-9

    def test_a_node_that_slows_down_is_seen_to(self):
        load = Load()
        load.begin(0.0, 0.0)
        load.do(0.0, 100.0 * HALF_LIFE_S)
        load.end(HALF_LIFE_S, 0.0)
        load.begin(HALF_LIFE_S, 0.0)
        load.do(0.0, 10.0 * 4 * HALF_LIFE_S)
        load.end(5 * HALF_LIFE_S, 0.0)
        assert 10.0 < load.speed < 45.0
