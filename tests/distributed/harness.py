"""Processes of one job as threads of this one: links over loopback, a fake runner each."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

from tests.engine.fake import FakeRunner
from turbojax.distributed.follower import follow
from turbojax.distributed.leader import LeaderRunner
from turbojax.distributed.meeting import gather, join
from turbojax.distributed.places import Place
from turbojax.distributed.watch import Watch

TOKEN = "a token of the test job"
FACTS = {"jax": "0.10.2", "config": "{}"}
WAIT_S = 20


def free_port():
    """A port whose next one is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1] - 1


def places(num, timeout_s=WAIT_S, token=TOKEN):
    port = free_port()
    return [Place("127.0.0.1", port, num, number, token, timeout_s) for number in range(num)]


class Process(threading.Thread):
    """A thread that keeps what its function raises or gives."""

    def __init__(self, function, *args):
        super().__init__(daemon=True)
        self._function, self._args = function, args
        self.result = self.error = None
        self.start()

    def run(self):
        try:
            self.result = self._function(*self._args)
        except Exception as error:
            self.error = error

    def end(self):
        """Its result, once it ends; raises its error."""
        self.join(WAIT_S)
        assert not self.is_alive(), "it hangs"
        if self.error is not None:
            raise self.error
        return self.result


def links(num, facts=None):
    """The leader's links, and each follower's."""
    where = places(num)
    followers = [Process(join, place, FACTS if facts is None else facts) for place in where[1:]]
    found = gather(where[0], FACTS)
    return found, [follower.end() for follower in followers]


class Job:
    """A leader's runner whose followers run in threads.

    Attributes:
        runner: the leader's.
        runners: the fake of each process, the leader's first.
        followers: the threads.
        left: why a process would have been ended.
    """

    def __init__(self, make_runner, num, grace_s=0.2):
        self.left = []
        self.leader_links, self.follower_links = links(num)
        self.runners = [make_runner() for _ in range(num)]
        self.watches = [Watch(self.left.append, grace_s) for _ in range(num)]
        self.followers = [
            Process(follow, *each) for each in zip(self.follower_links, self.runners[1:], self.watches[1:], strict=True)
        ]
        self.runner = LeaderRunner(self.runners[0], self.leader_links, self.watches[0], grace_s=grace_s)


@contextmanager
def job(make_runner=lambda: FakeRunner(4, 4), num=3, grace_s=0.2):
    found = Job(make_runner, num, grace_s)
    try:
        yield found
    finally:
        found.runner.close()
        for follower in found.followers:
            follower.join(WAIT_S)
