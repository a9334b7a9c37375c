"""The engine's thread: takes requests, cancels them, and steps while there is anything to do."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable

from turbojax.engine.metrics import EngineStatus
from turbojax.engine.plan import Runner
from turbojax.engine.request import Request
from turbojax.engine.scheduler import Scheduler
from turbojax.engine.stepper import Stepper, describe
from turbojax.errors import EngineClosedError, EngineFailedError, QueueFullError, TurbojaxError

Command = Callable[[], None]

log = logging.getLogger(__name__)


class EngineLoop:
    """Owns scheduler and runner; only its thread touches them. Requests report through their sinks, in that thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler, self._stepper = scheduler, Stepper(scheduler, runner)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._end: TurbojaxError | None = None  # why no further request is taken
        self._progress_s = time.monotonic()  # when a step finished, or work came to an engine that had none
        self._num_compiled = 0  # traces and programs, when somebody last asked for the status
        # Nothing is queued behind the command that closes. A stream that is collected as garbage cancels its requests
        # in whatever thread allocates just then, which may hold the lock.
        self._lock = threading.RLock()
        self._open: set[Request] = set()  # requests that were handed over and have not ended
        scheduler.endings.on_end = self.leave
        self._thread = threading.Thread(target=self._run, name="turbojax-engine", daemon=True)
        self._thread.start()

    def submit(self, *requests: Request) -> None:
        """Hands over requests that the scheduler can run (see `Scheduler.check`): all of them, or none.

        Raises:
            EngineClosedError: the engine is closed.
            EngineFailedError: the engine has failed, with its reason.
            QueueFullError: with these, the engine would hold more than `max_queue_len` beyond those that run at once.
        """
        with self._lock:
            if self._end is not None:
                raise type(self._end)(str(self._end)) from self._end
            self.check_room(len(requests))
            if not self._has_work:
                self._progress_s = time.monotonic()
            self._open.update(requests)
            self._commands.put(lambda: self._add(requests))

    @property
    def num_open(self) -> int:
        """Requests that were handed over and have not ended."""
        return len(self._open)

    def has(self, request: Request) -> bool:
        """Whether a request was handed over here and has not ended."""
        return request in self._open

    @property
    def num_slots(self) -> int:
        """Requests that run at once."""
        return self._scheduler.config.num_slots

    @property
    def max_open(self) -> float:
        """Requests that may be handed over and not have ended."""
        max_queue_len = self._scheduler.config.max_queue_len
        return math.inf if max_queue_len is None else self.num_slots + max_queue_len

    @property
    def num_cacheable_tokens(self) -> int:
        """Most tokens that a later request may find in its pool; 0 without a prefix cache."""
        return self._scheduler.num_cacheable_tokens

    def check_room(self, num_new: int) -> None:
        """Raises QueueFullError where so many more requests would be too many."""
        config, num_open = self._scheduler.config, len(self._open)
        if num_open + num_new > self.max_open:
            raise QueueFullError(
                f"{num_new} new requests beside {num_open} would be more than {config.num_slots} that run at once and "
                f"{config.max_queue_len} that wait; try again later, send fewer at once, or raise max_queue_len"
            )

    @property
    def _has_work(self) -> bool:
        """A request is open, or one that was given up still has a slot or a step in flight."""
        return bool(self._open) or not self._stepper.is_idle

    @property
    def status(self) -> EngineStatus:
        """How the engine stands. Any thread may ask; each number is of some moment during the call."""
        pool, running = self._scheduler.pool, list(self._scheduler.running)
        with self._lock:
            num_waiting = len(self._open) - sum(request in self._open for request in running)
        num_free, num_available = pool.num_free_pages(), pool.num_available_pages()
        num_idle = max(0, num_available - num_free)
        return EngineStatus(
            num_running=len(running),
            num_waiting=num_waiting,
            num_held_pages=max(0, pool.num_usable_pages - num_free - num_idle),
            num_idle_pages=num_idle,
            num_free_pages=num_free,
            stalled_s=max(0.0, time.monotonic() - self._last_progress_s()) if self._has_work else 0.0,
            failure=None if self._end is None else str(self._end),
        )

    def _last_progress_s(self) -> float:
        """When a step finished. A program that began or came to be since somebody last asked is progress too: the
        first request of a shape waits for several, on a slow machine for minutes."""
        metrics = self._scheduler.metrics
        num_compiled = metrics.num_traces + metrics.num_compilations
        if num_compiled != self._num_compiled:
            self._num_compiled, self._progress_s = num_compiled, time.monotonic()
        return self._progress_s

    def leave(self, request: Request) -> None:
        """Counts a request as ended; whoever has seen its end may say so before the engine does."""
        with self._lock:
            self._open.discard(request)

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it stands; its sink hears nothing more. An engine that ended has ended it already."""
        with self._lock:
            self.leave(request)
            if self._end is None:
                self._commands.put(lambda: self._scheduler.cancel(request))

    def close(self) -> None:
        """Ends all requests with EngineClosedError and stops the thread."""
        self._stop(EngineClosedError("the engine is closed: make a new pipeline"))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def fail(self, reason: TurbojaxError) -> None:
        """Ends all requests with EngineFailedError and the engine with them, as soon as its step in flight is over."""
        failure = EngineFailedError(str(reason))
        failure.__cause__ = reason
        self._stop(failure)

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
                    self._scheduler.expire(time.monotonic())
                    self._stepper.step()
                    self._progress_s = time.monotonic()
            except EngineFailedError as failure:
                self._stop(failure)
            except Exception as error:  # no step's: the engine itself is wrong, and must not hang its requests
                log.exception("the engine ends")
                inside = EngineFailedError(f"an error inside the engine: {describe(error)}")
                inside.__cause__ = error
                self._stop(inside)
        self._take_commands()
        self._scheduler.fail_all(self._end)
        self._stepper.close()

    def _take_commands(self) -> None:
        """Runs what was sent; waits for something to do when nothing is under way."""
        idle = self._stepper.is_idle
        while True:
            try:
                command = self._commands.get(block=idle and self._end is None)
            except queue.Empty:
                return
            idle = False
            try:
                command()
            except Exception:  # it concerned one request; the others go on
                log.exception("a command to the engine failed")

    def _add(self, requests: tuple[Request, ...]) -> None:
        for request in requests:
            try:
                self._scheduler.add(request)
            except Exception as error:
                self._scheduler.endings.fail(request, error)
