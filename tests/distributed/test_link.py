"""A connection between processes: nothing too large is read, and whoever is gone is named."""

import threading

import pytest

from tests.distributed.harness import Process, links
from turbojax.distributed import wire
from turbojax.errors import ClusterError, ProcessLostError


def test_a_message_that_is_too_large_is_not_read():
    (mine,), (theirs,) = links(2)
    theirs._connection.sendall(wire.LENGTH.pack(wire.MAX_FRAME_BYTES + 1))
    with pytest.raises(ClusterError, match=f"sends a message of {wire.MAX_FRAME_BYTES + 1} bytes; accepted: at most"):
        mine.receive()
    mine.close()
    theirs.close()


def test_a_peer_that_is_gone_is_noticed_under_a_receive():
    (mine,), (theirs,) = links(2)
    waiting = Process(mine.receive)
    theirs.close()
    with pytest.raises(ProcessLostError, match=r"process 1 of 2 \(127.0.0.1\) is lost: it closed its connection"):
        waiting.end()
    mine.close()
    assert not any(thread is waiting for thread in threading.enumerate())
