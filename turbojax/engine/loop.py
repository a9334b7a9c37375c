"""The engine's thread: takes requests, plans, dispatches, and reads each step's tokens while the next one runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from turbojax.engine.plan import Runner, StepPlan
from turbojax.engine.request import Progress, Request, Status
from turbojax.engine.scheduler import Scheduler
from turbojax.errors import EngineClosedError, EngineFailedError

Command = Callable[[], None]


class EngineLoop:
    """Owns scheduler and runner; only its thread touches them. Requests report through their sinks, in that thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._in_flight: tuple[StepPlan, Any] | None = None
        self._closing = False
        self._lock = threading.Lock()  # nothing is queued behind the command that closes
        self._thread = threading.Thread(target=self._run, name="turbojax-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hands over a request that the scheduler can run (see `Scheduler.check`).

        Raises:
            EngineClosedError: the engine is closed.
        """
        self._send(lambda: self._scheduler.add(request))

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it stands; its sink hears nothing more. A closed engine has ended it already."""
        with self._lock:
            if not self._closing:
                self._commands.put(lambda: self._scheduler.cancel(request))

    def close(self) -> None:
        """Ends all requests with EngineClosedError and stops the thread."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._commands.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _send(self, command: Command) -> None:
        with self._lock:
            if self._closing:
                raise EngineClosedError("the engine is closed: make a new pipeline")
            self._commands.put(command)

    def _run(self) -> None:
        while not self._closing:
            self._take_commands()
            if not self._closing:
                self._step()
        self._take_commands()
        self._end_all(EngineClosedError("the engine was closed before the request ended"))

    def _take_commands(self) -> None:
        """Runs what was sent; waits for something to do when nothing is under way."""
        idle = self._scheduler.is_idle and self._in_flight is None
        while True:
            try:
                command = self._commands.get(block=idle and not self._closing)
            except queue.Empty:
                return
            command()
            idle = False

    def _step(self) -> None:
        """Dispatches the next step, then reads the one before: the device works while the host does."""
        try:
            plan = self._scheduler.plan()
            handle = None if plan.is_empty else self._runner.dispatch(plan)
            if self._in_flight is not None:
                before, before_handle = self._in_flight
                self._scheduler.commit(before, self._runner.fetch(before_handle))
            elif plan.is_empty and not self._scheduler.is_idle:
                raise RuntimeError(self._stall())
            self._in_flight = None if plan.is_empty else (plan, handle)
        except Exception as error:  # whatever a step raises must reach the requests it held, not hang them
            self._in_flight = None
            failure = EngineFailedError(f"a step failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._scheduler.fail_in_flight(failure)

    def _stall(self) -> str:
        """Why requests that can neither run nor end are given up instead of being planned for ever."""
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        return (
            f"nothing can run, though {running} requests run and {waiting} wait: a step gave fewer tokens than planned"
        )

    def _end_all(self, error: Exception) -> None:
        waiting = list(self._scheduler.waiting)
        self._scheduler.waiting.clear()
        self._scheduler.fail_in_flight(error)
        for request in waiting:
            request.status, request.finish_reason = Status.FINISHED, "error"
            request.sink(Progress([], "error", error))
