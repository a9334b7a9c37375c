"""The engine's thread: takes requests, cancels them, and steps while there is anything to do."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from turbojax.engine.plan import Runner
from turbojax.engine.request import Request
from turbojax.engine.scheduler import Scheduler
from turbojax.engine.stepper import Stepper, describe
from turbojax.errors import EngineClosedError, EngineFailedError, TurbojaxError

Command = Callable[[], None]

log = logging.getLogger(__name__)


class EngineLoop:
    """Owns scheduler and runner; only its thread touches them. Requests report through their sinks, in that thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler, self._stepper = scheduler, Stepper(scheduler, runner)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._end: TurbojaxError | None = None  # why no further request is taken
        self._lock = threading.Lock()  # nothing is queued behind the command that closes
        self._thread = threading.Thread(target=self._run, name="turbojax-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hands over a request that the scheduler can run (see `Scheduler.check`).

        Raises:
            EngineClosedError: the engine is closed.
            EngineFailedError: the engine has failed, with its reason.
        """
        with self._lock:
            if self._end is not None:
                raise type(self._end)(str(self._end)) from self._end
            self._commands.put(lambda: self._scheduler.add(request))

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it stands; its sink hears nothing more. An engine that ended has ended it already."""
        with self._lock:
            if self._end is None:
                self._commands.put(lambda: self._scheduler.cancel(request))

    def close(self) -> None:
        """Ends all requests with EngineClosedError and stops the thread."""
        self._stop(EngineClosedError("the engine is closed: make a new pipeline"))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _stop(self, reason: TurbojaxError) -> None:
        with self._lock:
            if self._end is None:
                self._end = reason
                self._commands.put(lambda: None)

    def _run(self) -> None:
        while self._end is None:
            try:
                self._take_commands()
                if self._end is None:
                    self._stepper.step()
            except EngineFailedError as failure:
                self._stop(failure)
            except Exception as error:  # no step's: the engine itself is wrong, and must not hang its requests
                log.exception("the engine ends")
                inside = EngineFailedError(f"an error inside the engine: {describe(error)}")
                inside.__cause__ = error
                self._stop(inside)
        self._take_commands()
        self._scheduler.fail_all(self._end)

    def _take_commands(self) -> None:
        """Runs what was sent; waits for something to do when nothing is under way."""
        idle = self._stepper.is_idle
        while True:
            try:
                command = self._commands.get(block=idle and self._end is None)
            except queue.Empty:
                return
            command()
            idle = False
