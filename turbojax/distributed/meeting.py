"""How the processes of a job meet: found in time, authenticated by a shared token, alike in what must be."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from turbojax.distributed.link import PROTOCOL, Link
from turbojax.distributed.places import Place
from turbojax.errors import ClusterError, ClusterMismatchError, CoordinatorUnreachableError, ProcessLostError

# Of strangers, who may send anything: nothing larger is read before the token is proved.
MAX_GREETING_BYTES = 4096
GREETING_TIMEOUT_S = 10.0
RETRY_S = 0.1
NOTICE_S = 10.0

log = logging.getLogger(__name__)

Facts = Mapping[str, str]
"""What must be the same in all processes, by name."""


def proof(token: str, role: str, *parts: bytes) -> bytes:
    """That its sender has the token; the parts are both sides' nonces, so that it holds for this connection alone."""
    message = b"\0".join([role.encode(), *(hashlib.sha256(part).digest() for part in parts)])
    return hmac.new(token.encode(), message, hashlib.sha256).digest()


@contextlib.contextmanager
def noticed(waiting: Callable[[], str]) -> Iterator[None]:
    """Says once what this process waits for, where that takes longer than processes do that start together."""
    timer = threading.Timer(NOTICE_S, lambda: log.warning("%s", waiting()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# -- the leader ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(place: Place) -> Iterator[socket.socket]:
    """A socket at the control port of this host, on all of its addresses.

    Raises:
        ClusterError: the port is taken.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        listener = socket.create_server(
            ("", place.control_port), family=family, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        raise ClusterError(
            f"port {place.control_port} of the leader cannot be had ({error.strerror}): choose another "
            "coordinator_address, whose port and the next one are free"
        ) from error
    with listener:
        yield listener


def gather(place: Place, facts: Facts) -> list[Link]:
    """The leader's links to the followers, in order, once all have come and are alike.

    Raises:
        CoordinatorUnreachableError: not all came in time; names those that are missing.
        ClusterMismatchError: one differs; all of them hear it too.
    """
    links: dict[int, Link] = {}
    strangers: list[str] = []
    deadline = time.monotonic() + place.timeout_s
    try:
        with listening(place) as listener, noticed(lambda: absent(place, links, strangers, NOTICE_S)):
            while len(links) < place.num_processes - 1:
                listener.settimeout(max(1e-3, deadline - time.monotonic()))
                try:
                    connection, address = listener.accept()
                except TimeoutError:
                    raise CoordinatorUnreachableError(absent(place, links, strangers, place.timeout_s)) from None
                host = address[0].removeprefix("::ffff:")
                link = Link(connection, f"a process at {host}")
                try:
                    number = greet(link, place)
                except ClusterError as error:  # whoever it is, the others may still come
                    strangers.append(f"{host} ({error})")
                    link.close()
                    continue
                link.name = f"process {number} of {place.num_processes} ({host})"
                if number in links:
                    with contextlib.closing(link):
                        problem = f"process_id {number} was taken twice, the first time by {links[number].name}"
                        refuse([*links.values(), link], problem)
                links[number] = link
        found = [links[number] for number in sorted(links)]
        settle(found, facts)
        return found
    except BaseException:
        for link in links.values():
            link.close()
        raise


def greet(link: Link, place: Place) -> int:
    """The number of the process at the other end, which has the token.

    Raises:
        ClusterError: it has not, or is none of ours.
    """
    link.wait_for(GREETING_TIMEOUT_S)
    ours = secrets.token_bytes(32)
    link.send({"protocol": PROTOCOL, "nonce": ours})
    theirs, number, num, shown = link.expect(
        "nonce", "process_id", "num_processes", "proof", max_bytes=MAX_GREETING_BYTES
    )
    if not isinstance(theirs, bytes) or not isinstance(shown, bytes) or not isinstance(number, int):
        raise ClusterError("its greeting is none")
    if not hmac.compare_digest(shown, proof(place.token, "follower", ours, theirs, str(number).encode())):
        link.send({"refused": f"process {number} has another token than the leader of its job"})
        raise ClusterError("another token")
    if num != place.num_processes or not 0 < number < place.num_processes:
        text = f"process {number} says num_processes is {num}; process 0 says {place.num_processes}"
        link.send({"refused": text})
        raise ClusterError(text)
    link.send({"proof": proof(place.token, "leader", theirs, ours)})
    link.wait_for(place.timeout_s)
    return number


def absent(place: Place, links: Mapping[int, Link], strangers: Sequence[str], seconds: float) -> str:
    """Who did not come in so many seconds."""
    missing = [str(number) for number in range(1, place.num_processes) if number not in links]
    turned_away = f"; turned away: {', '.join(strangers)}" if strangers else ""
    return (
        f"{len(links) + 1} of {place.num_processes} processes are here after {seconds:g} s: "
        f"{', '.join(missing)} missing at port {place.control_port}{turned_away}"
    )


def settle(links: Sequence[Link], facts: Facts) -> None:
    """The leader's side of `agree`: all processes have the same facts.

    Raises:
        ClusterMismatchError: one differs; all of them hear it too.
    """
    for link in links:
        (theirs,) = link.expect("facts")
        if problem := difference(facts, theirs, link.name):
            refuse(links, problem)
    for link in links:
        link.send({"agreed": True})
        link.wait_for(None)


def lowest(links: Sequence[Link], value: int) -> int:
    """The leader's side of `told_lowest`: the lowest of what all processes have."""
    found = min([value, *(link.expect("value")[0] for link in links)])
    for link in links:
        link.send({"lowest": found})
    return found


def difference(ours: Facts, theirs: Any, name: str) -> str | None:
    """The first fact that differs, with both values."""
    if not isinstance(theirs, dict) or theirs.keys() != ours.keys():
        return f"{name} does not know the same facts as process 0: {', '.join(ours)}"
    for fact, value in ours.items():
        if theirs[fact] != value:
            return f"{fact}: {name} has {theirs[fact]}, process 0 has {value}; all processes must have the same"
    return None


def refuse(links: Sequence[Link], problem: str) -> None:
    """Tells everybody why the job ends, and raises it."""
    for link in links:
        with contextlib.suppress(ProcessLostError):  # it has gone already
            link.send({"refused": problem})
    raise ClusterMismatchError(problem)


# -- a follower ---------------------------------------------------------------------------------------------


def join(place: Place, facts: Facts) -> Link:
    """A follower's link to the leader, once all processes have come and are alike.

    Raises:
        CoordinatorUnreachableError: nobody answers in time.
        ClusterMismatchError: processes differ, or the token is another; in the leader's words.
        ClusterError: somebody else answers there.
    """
    leader = f"process 0 of {place.num_processes} ({place.host}:{place.control_port})"
    with noticed(lambda: f"process {place.process_id} waits for {leader}, at most {place.timeout_s:g} s"):
        link = Link(connected(place), leader)
    try:
        link.wait_for(min(GREETING_TIMEOUT_S, place.timeout_s))
        protocol, theirs = link.expect("protocol", "nonce", max_bytes=MAX_GREETING_BYTES)
        if protocol != PROTOCOL or not isinstance(theirs, bytes):
            raise ClusterError(f"{link.name} speaks protocol {protocol}; this process speaks {PROTOCOL}")
        ours, number = secrets.token_bytes(32), str(place.process_id).encode()
        link.send({
            "nonce": ours, "process_id": place.process_id, "num_processes": place.num_processes,
            "proof": proof(place.token, "follower", theirs, ours, number),
        })  # fmt: skip
        (shown,) = link.expect("proof", max_bytes=MAX_GREETING_BYTES)
        if not hmac.compare_digest(shown, proof(place.token, "leader", ours, theirs)):
            raise ClusterMismatchError(f"{link.name} does not have the token of process {place.process_id}")
        link.wait_for(place.timeout_s)
        agree(link, facts)
    except BaseException:
        link.close()
        raise
    return link


def agree(link: Link, facts: Facts) -> None:
    """The follower's side of `settle`.

    Raises:
        ClusterMismatchError: processes differ, in the leader's words.
    """
    link.send({"facts": dict(facts)})
    link.expect("agreed")
    link.wait_for(None)


def told_lowest(link: Link, value: int) -> int:
    """The follower's side of `lowest`."""
    link.send({"value": value})
    return link.expect("lowest")[0]


def connected(place: Place) -> socket.socket:
    """A connection to the leader, which may start later than its followers."""
    deadline, reason = time.monotonic() + place.timeout_s, ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            return socket.create_connection((place.host, place.control_port), timeout=left)
        except OSError as error:
            reason = str(error)
        time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    raise CoordinatorUnreachableError(
        f"process {place.process_id} of {place.num_processes}: no leader at {place.host}:{place.control_port} after "
        f"{place.timeout_s:g} s ({reason}): is process 0 running there, and are ports {place.port} and "
        f"{place.control_port} open?"
    )
