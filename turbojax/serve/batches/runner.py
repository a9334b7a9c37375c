"""The batches' work in the background: few requests at a time, each answered once, whatever is started again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

from turbojax.json_lines import ForeignRecordError
from turbojax.serve.batches.answers import Result, record_of, run_few, unanswered
from turbojax.serve.batches.batches import BatchStore, Results
from turbojax.serve.batches.disk import BATCH, FILE, Folder, new_id
from turbojax.serve.batches.files import FileStore
from turbojax.serve.batches.protocol import Batch, BatchError, BatchErrors, BatchRequest, BatchState
from turbojax.serve.batches.requests import BatchLine, Entry, LineError, Problem, index_requests, read_requests
from turbojax.serve.openai_errors import ApiError
from turbojax.serve.settings import ServeConfig

BUSY_POLL_S = 1.0  # until a request that found the engine's queue full is tried again
RETRY_S = 60.0  # until a batch is tried again after disk or engine failed
SWEEP_S = 60.0
REASONS = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed before the batch was cancelled.",
}
Answer = Callable[[str, dict[str, Any]], Awaitable[Result]]
"""(url, body) -> what the route would respond."""

log = logging.getLogger(__name__)


class BatchRunner:
    """Files, batches, and a task for each batch that is not finished; they share a number of requests in flight.

    What a batch has come to is its state on disk, its input, and the lines of its two result files. A task reads them,
    does what is missing, and may be stopped at any point.
    """

    def __init__(
        self,
        folder: Folder,
        config: ServeConfig,
        answer: Answer,
        num_in_flight: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.files = FileStore(folder.files, config.max_batch_dir_bytes, clock)
        self.batches = BatchStore(folder.batches)
        self._folder, self._config, self._answer, self._clock = folder, config, answer, clock
        self._free = asyncio.Semaphore(num_in_flight)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answering: dict[str, asyncio.Future[None]] = {}
        self._results: dict[str, Results] = {}
        self._sweeper: asyncio.Task[None] | None = None

    # -- the whole -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Goes on with every batch that is not finished."""
        unfinished = self.batches.unfinished()
        kept = {file_id for state in unfinished for file_id in (state.output_id, state.error_id)}
        self.files.sweep(self.inputs_in_use(), being_written=kept)
        for state in unfinished:
            self._launch(state)
        self._sweeper = asyncio.create_task(self._sweep(), name="batch files")

    async def stop(self) -> None:
        """Stops where it stands; requests in flight are dropped, and run again by whoever starts next."""
        tasks = [*self._tasks.values(), *filter(None, [self._sweeper])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._folder.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await asyncio.to_thread(self.files.sweep, self.inputs_in_use())

    def inputs_in_use(self) -> set[str]:
        return {state.batch.input_file_id for state in self.batches.unfinished()}

    # -- what clients ask -----------------------------------------------------------------------------------

    def create(self, request: BatchRequest) -> Batch:
        """
        Raises:
            ApiError: there is no such file, or it is none of requests; many batches are unfinished.
        """
        if self.files.get(request.input_file_id).purpose != "batch":
            raise ApiError(400, "input_file_id: a file of purpose 'batch' is expected", param="input_file_id")
        now = int(self._clock())
        batch = Batch(
            id=new_id(BATCH),
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + request.window_s,
            metadata=request.metadata,
        )
        after = request.output_expires_after
        lifetime_s = after.seconds if after else None
        state = BatchState(batch=batch, output_id=new_id(FILE), error_id=new_id(FILE), output_lifetime_s=lifetime_s)
        self.batches.add(state)
        self._launch(state)
        return batch

    def get(self, batch_id: str) -> Batch:
        """With counts as they are now.

        Raises:
            ApiError: 404.
        """
        batch = self.batches.get(batch_id).batch
        if results := self._results.get(batch_id):
            batch.request_counts = results.counts(batch.request_counts.total)
        return batch

    def cancel(self, batch_id: str) -> Batch:
        """
        Raises:
            ApiError: 404; 409, it has ended.
        """
        state = self.batches.get(batch_id)
        batch = state.batch
        if batch.is_final or batch.status == "finalizing":
            raise ApiError(409, f"Cannot cancel a batch with status '{batch.status}'.", code="batch_ended")
        if batch.status != "cancelling":
            self._enter(state, "cancelling")
            if answering := self._answering.get(batch_id):
                answering.cancel()
        return self.get(batch_id)

    # -- one batch ------------------------------------------------------------------------------------------

    def _launch(self, state: BatchState) -> None:
        task = asyncio.create_task(self._run(state), name=state.batch.id)
        self._tasks[state.batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(state.batch.id, None))

    def _enter(self, state: BatchState, status: Any) -> None:
        """The batch has come to a status, at this time."""
        state.batch.status = status
        setattr(state.batch, f"{status}_at", int(self._clock()))
        self.batches.save(state)

    async def _run(self, state: BatchState) -> None:
        """Brings a batch to its end from wherever it is; tries again where disk or engine fail."""
        while not state.batch.is_final:
            try:
                await self._go_on(state)
            except ForeignRecordError as error:
                self._fail(state, [Problem(None, LineError("results_damaged", str(error)))])
            except Exception as error:
                log.error("batch %s stands still: %s", state.batch.id, root_of(error))
                await asyncio.sleep(RETRY_S)

    async def _go_on(self, state: BatchState) -> None:
        batch = state.batch
        path = self.files.content(batch.input_file_id)
        index = await asyncio.to_thread(index_requests, path, batch.endpoint, self._config)
        if index.problems:
            self._fail(state, index.problems)
            return
        # Reads what an earlier run has left, in this thread: when the server starts.
        results = Results(*(self.files.content(file_id) for file_id in (state.output_id, state.error_id)))
        self._results[batch.id] = results
        try:
            await self._answer_and_end(state, index.entries, results)
        finally:
            del self._results[batch.id]
            results.close()
        batch.request_counts = results.counts(len(index.entries))
        self._hand_over(state)
        self._enter(state, "cancelled" if batch.status == "cancelling" else state.ending)

    async def _answer_and_end(self, state: BatchState, entries: list[Entry], results: Results) -> None:
        """Every request gets its line: an answer, or why there is none."""
        batch = state.batch
        batch.request_counts.total = len(entries)
        if batch.status == "validating":
            self._enter(state, "in_progress")
        if batch.status == "in_progress":
            await self._answer_in_time(batch, [entry for entry in entries if entry.custom_id not in results], results)
        missing = [entry for entry in entries if entry.custom_id not in results]
        if batch.status == "in_progress":  # else it was cancelled meanwhile
            state.ending = "expired" if missing else "completed"
            self._enter(state, "finalizing")
        code = "batch_cancelled" if batch.status == "cancelling" else "batch_expired"
        for entry in missing:
            results.errors.append(unanswered(entry.custom_id, code, REASONS[code]))
            await asyncio.sleep(0)  # there may be thousands

    async def _answer_in_time(self, batch: Batch, missing: list[Entry], results: Results) -> None:
        """Answers requests until all are, the batch is cancelled, or its time is over."""
        left_s = batch.expires_at - self._clock()
        if left_s <= 0:
            return
        answering = asyncio.ensure_future(self._answer_all(batch, missing, results))
        self._answering[batch.id] = answering
        try:
            await asyncio.wait({answering}, timeout=left_s)
        finally:
            del self._answering[batch.id]
            answering.cancel()
            await asyncio.wait({answering})
        if not answering.cancelled():
            answering.result()

    async def _answer_all(self, batch: Batch, missing: list[Entry], results: Results) -> None:
        async def answer_one(line: BatchLine) -> None:
            result = await self._answer(line.url, line.body)
            while result.is_busy:
                await asyncio.sleep(BUSY_POLL_S)
                result = await self._answer(line.url, line.body)
            (results.output if result.is_success else results.errors).append(record_of(line.custom_id, result))

        path = self.files.content(batch.input_file_id)
        with closing(read_requests(path, missing, self._config)) as lines:
            await run_few(lines, answer_one, self._free)

    def _hand_over(self, state: BatchState) -> None:
        """Results become files of their own; one without lines is deleted."""
        batch, counts = state.batch, state.batch.request_counts
        for kind, file_id, num_lines in (
            ("output", state.output_id, counts.completed),
            ("error", state.error_id, counts.failed),
        ):
            if num_lines:
                self.files.adopt(file_id, f"{batch.id}_{kind}.jsonl", "batch_output", state.output_lifetime_s)
                setattr(batch, f"{kind}_file_id", file_id)
            else:
                self.files.content(file_id).unlink(missing_ok=True)

    def _fail(self, state: BatchState, problems: list[Problem]) -> None:
        errors = [
            BatchError(code=error.code, message=error.message, line=line, param=error.param) for line, error in problems
        ]
        state.batch.errors = BatchErrors(data=errors)
        self._enter(state, "failed")


def root_of(error: BaseException) -> BaseException:
    """The first of what came together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
