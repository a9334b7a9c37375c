"""What ends a process whose peers are gone: an error where one can be raised, an exit where a device holds a thread."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from turbojax.errors import ClusterError

# A collective whose peer is gone raises within a second or two (gloo), or never comes back (NCCL).
GRACE_S = 5.0


def leave_process(reason: str) -> None:
    """Ends this process: a thread that waits inside a collective cannot be ended in any other way."""
    sys.stderr.write(f"error: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


class Watch:
    """Knows why the job has failed, if it has, and whether this process still waits for its devices.

    Attributes:
        failure: the first reason, and the only one that counts.
        on_failure: called with it, once, from any thread.
    """

    def __init__(self, leave: Callable[[str], None] = leave_process, grace_s: float = GRACE_S) -> None:
        self.failure: ClusterError | None = None
        self.on_failure: Callable[[ClusterError], None] = lambda error: None
        self._leave, self._grace_s = leave, grace_s
        self._changed = threading.Condition()
        self._num_busy = 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Around whatever may wait for a device; raises what the job has failed with, before and after.

        Raises:
            ClusterError: the job has failed; errors of the work itself are then its consequence.
        """
        with self._changed:
            self.check()
            self._num_busy += 1
        try:
            yield
        except Exception as error:
            if self.failure is not None:
                raise self.failure from error
            raise
        finally:
            with self._changed:
                self._num_busy -= 1
                self._changed.notify_all()
        self.check()

    def report_to(self, on_failure: Callable[[ClusterError], None]) -> None:
        """Has it called with the failure, also where that has been already."""
        with self._changed:
            self.on_failure = on_failure
            failure = self.failure
        if failure is not None:
            on_failure(failure)

    def check(self) -> None:
        """Raises what the job has failed with, if it has."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: ClusterError) -> None:
        """The job has failed: work that does not come back within the grace ends with the process."""
        with self._changed:
            if self.failure is not None:
                return
            self.failure = error
            is_busy, on_failure = self._num_busy > 0, self.on_failure
        on_failure(error)
        if is_busy:
            threading.Thread(target=self._await_work, args=(str(error),), name="turbojax-watch", daemon=True).start()

    def _await_work(self, reason: str) -> None:
        with self._changed:
            is_back = self._changed.wait_for(lambda: self._num_busy == 0, self._grace_s)
        if not is_back:
            self._leave(reason)
