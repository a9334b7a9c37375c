"""Processes find each other in time and are alike, or each of them has an error that names who, where and what."""

import contextlib
import socket

import pytest

from tests.distributed.harness import FACTS, Process, links, places
from turbojax.distributed import meeting
from turbojax.distributed.meeting import agree, gather, join, settle
from turbojax.errors import ClusterError, ClusterMismatchError, CoordinatorUnreachableError


def end(*ends):
    for link in ends:
        link.close()


def test_all_processes_meet_in_order_and_speak():
    leader, followers = links(4)
    assert [link.name.split(" (")[0] for link in leader] == [f"process {number} of 4" for number in (1, 2, 3)]
    for number, (mine, theirs) in enumerate(zip(leader, followers, strict=True)):
        mine.send({"hello": number})
        assert theirs.receive() == {"hello": number}
        theirs.send((number, b"back"))
        assert mine.receive() == (number, b"back")
    end(*leader, *followers)


def test_later_facts_are_settled_on_the_same_links():
    leader, followers = links(3)
    facts = {"pages": "100"}
    others = [Process(agree, link, facts) for link in followers]
    settle(leader, facts)
    for other in others:
        other.end()
    others = [Process(agree, followers[0], facts), Process(agree, followers[1], {"pages": "99"})]
    with pytest.raises(ClusterMismatchError, match=r"pages: process 2 of 3 .* has 99, process 0 has 100"):
        settle(leader, facts)
    for other in others:
        with pytest.raises(ClusterMismatchError, match="has 99, process 0 has 100"):
            other.end()
    end(*leader, *followers)


def test_processes_that_differ_all_hear_in_what():
    where = places(2)
    other = Process(join, where[1], FACTS | {"jax": "0.12.0"})
    with pytest.raises(ClusterMismatchError, match=r"jax: process 1 of 2 \(.*\) has 0.12.0, process 0 has 0.10.2"):
        gather(where[0], FACTS)
    with pytest.raises(ClusterMismatchError, match=r"has 0\.12\.0, process 0 has 0\.10\.2"):
        other.end()


def test_nobody_at_the_coordinator_is_an_error_in_time_with_the_numbers(monkeypatch, caplog):
    monkeypatch.setattr(meeting, "NOTICE_S", 0.0)
    place = places(2, timeout_s=0.3)[1]
    with pytest.raises(CoordinatorUnreachableError, match=rf"process 1 of 2: no leader at 127.0.0.1:{place.port + 1} "):
        join(place, FACTS)
    waits = f"process 1 waits for process 0 of 2 (127.0.0.1:{place.port + 1}), at most 0.3 s"
    assert caplog.messages == [waits], "said before it is an error"


def test_processes_that_do_not_come_are_named(monkeypatch, caplog):
    monkeypatch.setattr(meeting, "NOTICE_S", 0.0)
    where = places(4, timeout_s=1.5)
    other = Process(join, where[2], FACTS)
    with pytest.raises(CoordinatorUnreachableError, match=r"2 of 4 processes are here after 1\.5 s: 1, 3 missing"):
        gather(where[0], FACTS)
    with pytest.raises(ClusterError, match=r"process 0 of 4 .* is lost"):
        other.end()
    assert any("of 4 processes are here after 0 s" in message for message in caplog.messages)


def test_a_process_with_another_token_is_turned_away_and_told():
    where = places(2, timeout_s=1.5)
    stranger = Process(join, places(2, token="another token, as long")[1].__class__(
        "127.0.0.1", where[0].port, 2, 1, "another token, as long", 1.5
    ), FACTS)  # fmt: skip
    with pytest.raises(CoordinatorUnreachableError, match=r"1 missing .*; turned away: .*another token"):
        gather(where[0], FACTS)
    with pytest.raises(ClusterMismatchError, match="process 1 has another token than the leader"):
        stranger.end()


def test_another_number_of_processes_is_named():
    where = places(3, timeout_s=1.5)
    wrong = where[0].__class__("127.0.0.1", where[0].port, 2, 1, where[0].token, 1.5)
    other = Process(join, wrong, FACTS)
    with pytest.raises(CoordinatorUnreachableError, match="num_processes is 2; process 0 says 3"):
        gather(where[0], FACTS)
    with pytest.raises(ClusterMismatchError, match="num_processes is 2; process 0 says 3"):
        other.end()


def test_a_number_that_is_taken_twice_ends_the_job():
    where = places(3)
    others = [Process(join, where[1], FACTS), Process(join, where[1], FACTS)]
    with pytest.raises(ClusterMismatchError, match="process_id 1 was taken twice"):
        gather(where[0], FACTS)
    for other in others:
        with pytest.raises(ClusterMismatchError, match="process_id 1 was taken twice"):
            other.end()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff" * 4, b"\0\0\0\2\xc1\xc1", b""])
def test_a_stranger_does_not_disturb_those_who_belong_together(sent):
    where = places(2)
    found = Process(gather, where[0], FACTS)
    while True:
        try:
            stranger = socket.create_connection(("127.0.0.1", where[0].control_port))
            break
        except ConnectionRefusedError:
            assert found.is_alive()
    with stranger:
        with contextlib.suppress(OSError):  # the leader was faster to hang up
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
        mine = join(where[1], FACTS)
        end(mine, *found.end())


def test_a_port_that_is_taken_is_named():
    where = places(2)
    with socket.create_server(("", where[0].control_port)), pytest.raises(ClusterError, match="cannot be had"):
        gather(where[0], FACTS)
