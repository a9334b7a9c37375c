"""The batches: what each has come to, on disk whenever that changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from turbojax.json_lines import RecordFile
from turbojax.serve.batches.disk import BATCH, ids_in, read_whole, write_whole
from turbojax.serve.batches.protocol import Batch, BatchState, RequestCounts
from turbojax.serve.openai_errors import OVERLOADED, ApiError

# Each unfinished one holds an index of its requests in memory.
MAX_UNFINISHED = 64


class BatchStore:
    """Batches by id. Only the event loop's thread calls."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[str, BatchState] = {}
        for batch_id in ids_in(folder, BATCH, ".json"):
            found = read_state(self._path(batch_id))
            if found is not None and found.batch.id == batch_id:
                self._states[batch_id] = found

    def _path(self, batch_id: str) -> Path:
        return self._folder / f"{batch_id}.json"

    def get(self, batch_id: str) -> BatchState:
        """
        Raises:
            ApiError: 404.
        """
        found = self._states.get(batch_id)
        if found is None:
            raise ApiError(404, f"No such batch: '{batch_id}'.", param="batch_id", code="batch_not_found")
        return found

    def all(self) -> list[Batch]:
        """The newest first."""
        known = (state.batch for state in self._states.values())
        return sorted(known, key=lambda one: (one.created_at, one.id), reverse=True)

    def unfinished(self) -> list[BatchState]:
        """The oldest first."""
        states = [state for state in self._states.values() if not state.batch.is_final]
        return sorted(states, key=lambda state: (state.batch.created_at, state.batch.id))

    def add(self, state: BatchState) -> None:
        """
        Raises:
            ApiError: 429, there are many already.
        """
        if len(self.unfinished()) >= MAX_UNFINISHED:
            message = f"{MAX_UNFINISHED} batches are unfinished, and no more are taken; try again later"
            raise ApiError(429, message, OVERLOADED, code="too_many_batches", headers={"Retry-After": "60"})
        self.save(state)
        self._states[state.batch.id] = state

    def save(self, state: BatchState) -> None:
        write_whole(self._path(state.batch.id), state.model_dump_json().encode())


def read_state(path: Path) -> BatchState | None:
    try:
        return BatchState.model_validate_json(read_whole(path))
    except ValidationError:
        return None


def custom_id_of(record: Any) -> str:
    """The request that a line of an output or error file answers."""
    if not isinstance(record, dict) or not isinstance(record.get("custom_id"), str):
        raise ValueError("no answer of a batch")
    custom_id: str = record["custom_id"]
    return custom_id


class Results:
    """What has come of a batch's requests: answers in one file, errors in another."""

    def __init__(self, output: Path, errors: Path) -> None:
        """Goes on with the files, without what was not written to its end.

        Raises:
            RecordFileError: they hold something else, or cannot be written.
        """
        self.output = RecordFile(output, custom_id_of)
        try:
            self.errors = RecordFile(errors, custom_id_of)
        except BaseException:
            self.output.close()
            raise

    def __contains__(self, custom_id: str) -> bool:
        return custom_id in self.output.finished or custom_id in self.errors.finished

    def counts(self, total: int) -> RequestCounts:
        return RequestCounts(total=total, completed=len(self.output.finished), failed=len(self.errors.finished))

    def close(self) -> None:
        """What was written stays, even when the machine stops."""
        for one in (self.output, self.errors):
            one.sync()
            one.close()
