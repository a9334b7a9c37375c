"""A follower: runs what the leader tells it, in the same order, and says how it fared."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from typing import Any

from turbojax.distributed.link import Link
from turbojax.distributed.watch import Watch
from turbojax.engine.plan import Runner
from turbojax.errors import ClusterError, ProcessLostError

log = logging.getLogger(__name__)


def follow(link: Link, runner: Runner, watch: Watch | None = None) -> None:
    """Runs steps until the leader closes its engine.

    Raises:
        ClusterError: the leader is lost, or ended the job because another process is; the message has its reason.
    """
    watch, inbox = watch or Watch(), queue.SimpleQueue[Any]()
    thread = threading.Thread(target=listen, args=(link, inbox, watch), name="turbojax-leader", daemon=True)
    thread.start()
    try:
        Follower(link, runner, watch).run(inbox)
    finally:
        link.close()
        thread.join()


def listen(link: Link, inbox: queue.SimpleQueue[Any], watch: Watch) -> None:
    """The thread that hears the leader, also while the devices are busy. None in the inbox is the end."""
    try:
        while True:
            command = link.receive()
            match command:
                case (int(), "end", ("",)):
                    break
                case (int(), "end", (str(reason),)):
                    raise ClusterError(reason)
                case (int(), str(), tuple()):
                    inbox.put(command)
                case _:
                    raise ClusterError(f"{link.name} speaks another protocol: {type(command).__name__}")
    except ClusterError as error:
        watch.fail(error)
    inbox.put(None)


class Follower:
    """One process's share of the leader's commands."""

    def __init__(self, link: Link, runner: Runner, watch: Watch) -> None:
        self._link, self._runner, self._watch = link, runner, watch
        self._handles: dict[int, Any] = {}  # by step

    def run(self, inbox: queue.SimpleQueue[Any]) -> None:
        """See `follow`."""
        while (command := inbox.get()) is not None:
            number, name, values = command
            fault = ""
            try:
                with self._watch.at_work():
                    self._do(name, values)
            except Exception as error:
                self._watch.check()
                fault = f"{name}: {type(error).__name__}: {error}"
                log.warning("a command failed: %s", fault)
            self._answer(number, fault)
        self._watch.check()

    def _do(self, name: str, values: tuple[Any, ...]) -> None:
        match name, values:
            case "dispatch", (plan,):
                self._handles[plan.step_id] = self._runner.dispatch(plan)
            case "pick", (step, masks):
                self._runner.pick(self._handles[step], masks)
            case "fetch", (step,):
                self._runner.fetch(self._handles.pop(step))
            case "reset", ():
                self._handles.clear()
                self._runner.reset()
            case _:
                raise ClusterError(f"process 0 tells of {name}, which is unknown")

    def _answer(self, number: int, fault: str) -> None:
        # The thread that hears the leader knows why it is gone, and whether that is an end as it should be.
        with contextlib.suppress(ProcessLostError):
            self._link.send({"command": number, "fault": fault})
