"""The leader's runner: tells every follower what it runs, runs it too, and sees that all of them fare alike."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

import numpy as np

from turbojax.distributed.link import Link
from turbojax.distributed.watch import GRACE_S, Watch
from turbojax.engine.plan import Runner, StepPlan, StepResult
from turbojax.errors import ClusterError, ProcessLostError

T = TypeVar("T")
LEADER = -1  # in place of a follower's number


class Outcomes:
    """How each process fared with each command. They must agree: after a step that one of them did not run, the states
    of their devices are no longer one."""

    def __init__(self, names: Sequence[str], fail: Callable[[ClusterError], None], grace_s: float) -> None:
        self._names, self._fail, self._grace_s = names, fail, grace_s
        self._changed = threading.Condition()
        self._open: dict[int, dict[int, str]] = {}  # command -> process -> what went wrong, or ""

    def record(self, process: int, command: int, fault: str) -> None:
        """Takes in how one process fared."""
        with self._changed:
            found = self._open.setdefault(command, {})
            found[process] = fault
            problem = self._problem(found)
            if len(found) == len(self._names) + 1:
                del self._open[command]
                self._changed.notify_all()
            is_ahead = fault != "" and LEADER not in found
        if problem is not None:
            self._fail(ProcessLostError(problem))
        elif is_ahead:  # the leader fails in the same way, or waits for ever for the one that did
            timer = threading.Timer(self._grace_s, self._expire, args=(process, command, fault))
            timer.daemon = True
            timer.start()

    def _problem(self, found: Mapping[int, str]) -> str | None:
        if LEADER not in found or len({fault != "" for fault in found.values()}) == 1:
            return None
        process, fault = next((process, fault) for process, fault in found.items() if fault)
        return f"{self._name(process)} failed where others went on: {fault}"

    def _expire(self, process: int, command: int, fault: str) -> None:
        with self._changed:
            if LEADER in self._open.get(command, {LEADER: ""}):
                return
        self._fail(ProcessLostError(f"{self._name(process)} failed, and process 0 waits for it: {fault}"))

    def _name(self, process: int) -> str:
        return "process 0" if process == LEADER else self._names[process]

    def wait(self, command: int, is_over: Callable[[], bool]) -> None:
        """Until all have answered everything up to this command, or it is over."""
        with self._changed:
            self._changed.wait_for(lambda: is_over() or all(number > command for number in self._open))

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class LeaderRunner:
    """A `Runner` on all processes. Followers hear of a command before the leader begins it, so that none waits long."""

    def __init__(
        self, inner: Runner, links: Sequence[Link], watch: Watch | None = None, *, grace_s: float = GRACE_S,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """
        Args:
            inner: this process's own runner.
            links: to the followers, whose `follow` runs.
            watch: told of what fails.
            grace_s: how long a follower may have failed before the leader does too.
            on_close: called once the followers are gone as they should be.
        """
        self._inner, self._links, self.watch = inner, list(links), watch or Watch()
        self.max_prefill_chunks = inner.max_prefill_chunks
        self._numbers, self._grace_s, self._on_close = count(1), grace_s, on_close
        self._outcomes = Outcomes([link.name for link in links], self.fail, grace_s)
        self._is_closed, self._lock = False, threading.Lock()
        self._threads = [
            threading.Thread(target=self._listen, args=(number, link), name=f"turbojax-{link.name}", daemon=True)
            for number, link in enumerate(self._links)
        ]
        for thread in self._threads:
            thread.start()

    # -- the Runner protocol ------------------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> tuple[int, Any]:
        """The step's number, and this process's own handle."""
        return plan.step_id, self._together("dispatch", (plan,), lambda: self._inner.dispatch(plan))[1]

    def pick(self, handle: tuple[int, Any], masks: Mapping[int, np.ndarray]) -> None:
        step, own = handle
        self._together("pick", (step, dict(masks)), lambda: self._inner.pick(own, masks))

    def fetch(self, handle: tuple[int, Any]) -> StepResult:
        """Waits for all processes: none is ever more than a step behind."""
        step, own = handle
        number, result = self._together("fetch", (step,), lambda: self._inner.fetch(own))
        self._await(number)
        return result

    def reset(self) -> None:
        self._await(self._together("reset", (), self._inner.reset)[0])

    # -- the other processes ------------------------------------------------------------------------------

    def _together(self, name: str, values: tuple[Any, ...], run: Callable[[], T]) -> tuple[int, T]:
        """The command's number, and what came of it here.

        Raises:
            ClusterError: the job has failed.
            Exception: whatever it raises here; the followers then raise it too.
        """
        number = next(self._numbers)
        with self.watch.at_work():
            self._tell((number, name, values))
            try:
                result = run()
            except Exception as error:
                self._outcomes.record(LEADER, number, f"{name}: {type(error).__name__}: {error}")
                raise
            self._outcomes.record(LEADER, number, "")
        return number, result

    def _tell(self, command: tuple[int, str, tuple[Any, ...]]) -> None:
        for link in self._links:
            try:
                link.send(command)
            except ProcessLostError as error:
                self.fail(error)
                raise

    def _await(self, number: int) -> None:
        with self.watch.at_work():
            self._outcomes.wait(number, lambda: self.watch.failure is not None)

    def _listen(self, process: int, link: Link) -> None:
        """The thread of one follower: how it fares, and whether it is there."""
        try:
            while True:
                command, fault = link.expect("command", "fault")
                self._outcomes.record(process, command, fault)
        except ClusterError as error:
            if not self._is_closed:
                self.fail(error)
        finally:
            link.close()

    def fail(self, error: ClusterError) -> None:
        """Ends the job on all processes; the first reason counts."""
        self.watch.fail(error)
        self._end()
        self._outcomes.wake()

    def close(self) -> None:
        """Lets the followers go, and waits a moment for them; the engine calls it once."""
        self._end()
        for thread in self._threads:
            thread.join(self._grace_s)
        if self.watch.failure is None:
            self._on_close()

    def _end(self) -> None:
        """Tells the followers, once, that the job is over, and why if it has failed."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        reason = "" if self.watch.failure is None else str(self.watch.failure)
        for link in self._links:
            with contextlib.suppress(ClusterError):  # it is gone
                link.send((0, "end", (reason,)))
            link.finish()
