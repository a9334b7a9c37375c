"""Files and batches as they go over the wire and, batches, to disk."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from turbojax.serve.protocol.base import Strict

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
FINAL = frozenset({"failed", "completed", "expired", "cancelled"})


class FileObject(BaseModel):
    """A file, `bytes` large; times are seconds since 1970."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class ExpiresAfter(Strict):
    """A file is deleted so many seconds after it was made: an hour at least, at most 30 days."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class BatchRequest(Strict):
    """What to run, how long to try (hours, at most 30 days), and up to 16 notes to find the batch by."""

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Endpoint
    completion_window: Annotated[str, Field(pattern=r"^([1-9][0-9]?|[1-6][0-9]{2}|7[01][0-9]|720)h$")]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def window_s(self) -> int:
        return int(self.completion_window[:-1]) * 3600


class BatchError(BaseModel):
    """What is wrong with the input file; lines count from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """Of a batch that has ended, completed and failed are all of them."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(BaseModel):
    """A batch; times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = Field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def is_final(self) -> bool:
        return self.status in FINAL


class BatchList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchState(BaseModel):
    """A batch as it is kept: beside what clients see, where its answers gather, and how it ends once it is final."""

    batch: Batch
    ending: Literal["completed", "expired"] = "completed"
    output_id: str
    error_id: str
    output_lifetime_s: int | None = None
