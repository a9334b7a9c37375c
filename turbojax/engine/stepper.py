"""One step ahead: dispatches the next step before it reads the one before, and goes on from steps that fail."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from turbojax.engine.plan import Runner, StepPlan
from turbojax.engine.request import Request
from turbojax.engine.scheduler import Scheduler
from turbojax.errors import EngineFailedError, SlotError, StepFailedError

# Steps that fail without anybody being found at fault, counted from the last request that finished as it should:
# more than this, and the engine would recompute the same tokens for ever.
MAX_UNEXPLAINED_FAILURES = 16

log = logging.getLogger(__name__)


class Fault(NamedTuple):
    """A step that raised, and what."""

    plan: StepPlan
    error: Exception


class Stepper:
    """Drives a scheduler and a runner, a step at a call, from one thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._in_flight: tuple[StepPlan, Any] | None = None
        self._num_unexplained, self._num_finished_then = 0, 0

    @property
    def is_idle(self) -> bool:
        return self._in_flight is None and self._scheduler.is_idle

    def step(self) -> None:
        """Dispatches the next step, then reads the one before: the device works while the host does.

        Raises:
            EngineFailedError: the device is lost, or steps fail without end; nothing is in flight any more.
        """
        plan, fault = self._scheduler.plan(), None
        before, self._in_flight = self._in_flight, None
        if not plan.is_empty:
            try:
                self._in_flight = plan, self._runner.dispatch(plan)
            except Exception as error:
                fault = Fault(plan, error)
        if before is not None:
            try:
                result = self._runner.fetch(before[1])
            except Exception as error:  # the later step, if it raised too, only followed
                fault = Fault(before[0], error)
            else:
                self._scheduler.commit(before[0], result)
        elif plan.is_empty and not self._scheduler.is_idle:
            self._scheduler.fail_running(StepFailedError(self._stall()))
        fault = fault or self._pick()
        if fault is not None:
            self._recover(fault)

    def close(self) -> None:
        """Ends the runner; nothing is in flight any more that anybody waits for."""
        self._runner.close()

    def _pick(self) -> Fault | None:
        """Lets the step in flight sample, where guides had to see the tokens of the one before first.

        Their masks are made here, while the device runs the forward pass.
        """
        if self._in_flight is None:
            return None
        plan, handle = self._in_flight
        try:
            masks = self._scheduler.masks(plan)
            if masks:
                self._runner.pick(handle, masks)
        except Exception as error:
            return Fault(plan, error)
        return None

    def _stall(self) -> str:
        """Why requests that can neither run nor end are given up instead of being planned for ever."""
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        return (
            f"nothing can run, though {running} requests run and {waiting} wait: a step gave fewer tokens than planned"
        )

    def _recover(self, fault: Fault) -> None:
        """Goes on with fresh state: whoever is at fault ends, the others are recomputed from their token ids."""
        log.warning("a step failed, its requests are recomputed: %s", describe(fault.error))
        log.debug("its traceback", exc_info=fault.error)
        self._in_flight = None
        self._scheduler.metrics.num_failed_steps += 1
        suspects, failed = self._blame(fault)
        self._scheduler.recover(suspects, failed)
        if not failed:
            self._count_unexplained(fault.error)
        try:
            self._runner.reset()
        except Exception as error:
            text = f"the device is lost: a step failed ({describe(fault.error)}), and fresh state too"
            raise EngineFailedError(f"{text}: {describe(error)}") from error

    def _blame(self, fault: Fault) -> tuple[list[Request], dict[Request, Exception]]:
        """Suspects, and those at fault: the slot that the error names, or who failed alone while on probation."""
        named = self._scheduler.named_in(fault.plan)
        if isinstance(fault.error, SlotError) and fault.error.slot in named:
            return [], {named[fault.error.slot]: fault.error}
        requests = list(named.values())
        if len(requests) == 1 and self._scheduler.on_probation(requests[0]):
            error = StepFailedError(
                f"request {requests[0].request_id}: its step failed twice, the second time alone on fresh state: "
                f"{describe(fault.error)}"
            )
            error.__cause__ = fault.error
            return [], {requests[0]: error}
        return requests, {}

    def _count_unexplained(self, error: Exception) -> None:
        num_finished = self._scheduler.metrics.num_finished_requests
        if num_finished > self._num_finished_then:
            self._num_unexplained, self._num_finished_then = 0, num_finished
        self._num_unexplained += 1
        if self._num_unexplained > MAX_UNEXPLAINED_FAILURES:
            text = f"{self._num_unexplained} steps failed and no request finished between them, though each runs alone"
            raise EngineFailedError(f"{text}: {describe(error)}") from error


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
