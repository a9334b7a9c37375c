"""/v1/files and /v1/batches; on a server without --batch-dir they say so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from starlette.responses import FileResponse

from turbojax.serve.batches.answers import answer
from turbojax.serve.batches.disk import Folder
from turbojax.serve.batches.paging import page_of
from turbojax.serve.batches.protocol import Batch, BatchList, BatchRequest, FileDeleted, FileList, FileObject
from turbojax.serve.batches.runner import BatchRunner
from turbojax.serve.batches.uploads import SCHEMA, read_upload
from turbojax.serve.openai_errors import SERVER, ApiError
from turbojax.serve.protocol.errors import ErrorBody
from turbojax.serve.replies import ERRORS
from turbojax.serve.service import Service


@asynccontextmanager
async def running_batches(app: FastAPI) -> AsyncGenerator[None, None]:
    """The batches of an app, while it runs.

    Raises:
        BatchFolderError: the folder cannot be used.
    """
    service: Service = app.state.service
    config = service.config
    app.state.batches = None
    if config.batch_dir is None:
        yield
        return
    # Half of the slots stay free for those who wait for their answers.
    num_in_flight = config.batch_concurrency or max(1, service.pipe.max_batch_size // 2)
    answer_low = partial(answer, service, priority=config.batch_priority)
    runner = BatchRunner(Folder(Path(config.batch_dir)), config, answer_low, num_in_flight)
    app.state.batches = runner
    runner.start()
    try:
        yield
    finally:
        await runner.stop()


def batches_of(request: Request) -> BatchRunner:
    """
    Raises:
        ApiError: 501, they are off.
    """
    runner: BatchRunner | None = request.app.state.batches
    if runner is None:
        message = "files and batches are off: start the server with --batch-dir, the folder that they are kept in"
        # Clients of OpenAI try again after a 5xx unless they are told that it is no use.
        raise ApiError(501, message, SERVER, code="batches_off", headers={"x-should-retry": "false"})
    return runner


Batches = Annotated[BatchRunner, Depends(batches_of)]
MORE_ERRORS: dict[int | str, dict[str, Any]] = {
    409: {"model": ErrorBody, "description": "A batch has ended, or uses the file."},
    413: {"model": ErrorBody, "description": "The upload is too large."},
    507: {"model": ErrorBody, "description": "There is no room for it."},
}
router = APIRouter(tags=["batches"], lifespan=running_batches, responses=ERRORS | MORE_ERRORS)


# -- files ------------------------------------------------------------------------------------------------


@router.post("/v1/files", openapi_extra={"requestBody": SCHEMA})
async def upload_file(request: Request, batches: Batches) -> FileObject:
    """Keeps a file of requests for a batch, one JSON object a line."""
    async with request.form(max_files=1, max_fields=8, max_part_size=1024) as form:
        upload = read_upload(form)
        return await asyncio.to_thread(batches.files.create, upload.file.file, upload.filename, upload.lifetime_s)


@router.get("/v1/files")
async def list_files(
    batches: Batches,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> FileList:
    """The files, the newest first unless `order` says otherwise."""
    files = [one for one in batches.files.all() if purpose in (None, one.purpose)]
    return FileList(**page_of(files if order == "desc" else files[::-1], after, limit)._asdict())


@router.get("/v1/files/{file_id}")
async def retrieve_file(file_id: str, batches: Batches) -> FileObject:
    """What is known of a file."""
    return batches.files.get(file_id)


@router.get("/v1/files/{file_id}/content", response_class=FileResponse)
async def file_content(file_id: str, batches: Batches) -> FileResponse:
    """What a file holds."""
    path = batches.files.content(batches.files.get(file_id).id)
    return FileResponse(path, media_type="application/octet-stream", headers={"X-Content-Type-Options": "nosniff"})


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, batches: Batches) -> FileDeleted:
    """Deletes a file that no unfinished batch reads."""
    if file_id in batches.inputs_in_use():
        raise ApiError(409, "an unfinished batch reads the file: cancel it first", code="file_in_use")
    batches.files.delete(file_id)
    return FileDeleted(id=file_id)


# -- batches ----------------------------------------------------------------------------------------------


@router.post("/v1/batches")
async def create_batch(body: BatchRequest, batches: Batches) -> Batch:
    """Begins to answer the requests of a file."""
    return batches.create(body)


@router.get("/v1/batches")
async def list_batches(
    batches: Batches, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> BatchList:
    """The batches, the newest first."""
    page = page_of(batches.batches.all(), after, limit)
    return BatchList(**page._replace(data=[batches.get(one.id) for one in page.data])._asdict())


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(batch_id: str, batches: Batches) -> Batch:
    """How far a batch is."""
    return batches.get(batch_id)


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, batches: Batches) -> Batch:
    """Ends a batch; what was answered stays."""
    return batches.cancel(batch_id)
