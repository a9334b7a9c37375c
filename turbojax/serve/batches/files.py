"""The files: contents on disk, found by ids that were given out."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import IO, Literal

from pydantic import ValidationError

from turbojax.serve.batches.disk import FILE, ids_in, new_id, read_whole, write_whole
from turbojax.serve.batches.protocol import FileObject
from turbojax.serve.openai_errors import SERVER, ApiError

COPY_BYTES = 1 << 20
Purpose = Literal["batch", "batch_output"]


class FileStore:
    """What was uploaded and what batches gave. Any thread may call.

    A file is there once <id>.json is; its content is written before. Paths are made of ids of the index alone, never
    of what a request says.
    """

    def __init__(self, folder: Path, max_total_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._max_total_bytes, self._clock = folder, max_total_bytes, clock
        self._lock = threading.Lock()
        self._files: dict[str, FileObject] = {}
        self._coming: dict[str, int] = {}  # bytes of what is being uploaded, which have their room already
        contents = ids_in(folder, FILE, ".jsonl")
        for file_id in ids_in(folder, FILE, ".json"):
            found = read_object(self._meta(file_id))
            if found is None or found.id != file_id or file_id not in contents:
                self._meta(file_id).unlink(missing_ok=True)
            else:
                self._files[file_id] = found

    # -- paths ---------------------------------------------------------------------------------------------

    def _meta(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"

    def content(self, file_id: str) -> Path:
        """Where the content of a file is, or of one that is being written; the id is one that was made here."""
        return self._folder / f"{file_id}.jsonl"

    # -- what is there --------------------------------------------------------------------------------------

    def get(self, file_id: str) -> FileObject:
        """
        Raises:
            ApiError: 404.
        """
        found = self._files.get(file_id)
        if found is None or (found.expires_at is not None and found.expires_at <= self._clock()):
            raise ApiError(404, f"No such file: '{file_id}'.", param="file_id", code="file_not_found")
        return found

    def all(self) -> list[FileObject]:
        """The newest first."""
        with self._lock:
            known = self._unexpired()
        return sorted(known, key=lambda one: (one.created_at, one.id), reverse=True)

    def _unexpired(self) -> list[FileObject]:
        """Whoever calls has the lock."""
        now = self._clock()
        return [one for one in self._files.values() if one.expires_at is None or one.expires_at > now]

    # -- changes --------------------------------------------------------------------------------------------

    def create(self, source: IO[bytes], filename: str, lifetime_s: int | None = None) -> FileObject:
        """Keeps what `source` has from where it stands.

        Raises:
            ApiError: 507, there is no room for it.
        """
        file_id = new_id(FILE)
        part = self._folder / f"{file_id}.part"
        try:
            with part.open("wb") as target:
                for piece in iter(lambda: source.read(COPY_BYTES), b""):
                    self._reserve(file_id, len(piece))
                    target.write(piece)
                target.flush()
                os.fsync(target.fileno())
            part.replace(self.content(file_id))
            return self.adopt(file_id, filename, "batch", lifetime_s)
        except BaseException as error:
            part.unlink(missing_ok=True)
            self.content(file_id).unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise no_room(f"the file cannot be kept: {error.strerror}") from error
            raise
        finally:
            with self._lock:
                self._coming.pop(file_id, None)

    def _reserve(self, file_id: str, num_bytes: int) -> None:
        """Takes room for so many more bytes of an upload, beside the files and what else is being uploaded.

        Raises:
            ApiError: 507.
        """
        with self._lock:
            coming = self._coming | {file_id: self._coming.get(file_id, 0) + num_bytes}
            there = {one.id: one.bytes for one in self._unexpired()}
            if sum((coming | there).values()) > self._max_total_bytes:
                raise no_room(f"the files would be larger than {self._max_total_bytes} bytes together")
            self._coming = coming

    def adopt(self, file_id: str, filename: str, purpose: Purpose, lifetime_s: int | None = None) -> FileObject:
        """Makes a file of a content that is in its place; what is one already stays as it is."""
        if file_id in self._files:
            return self._files[file_id]
        now = int(self._clock())
        made = FileObject(
            id=file_id,
            bytes=self.content(file_id).stat().st_size,
            created_at=now,
            expires_at=None if lifetime_s is None else now + lifetime_s,
            filename=filename,
            purpose=purpose,
        )
        write_whole(self._meta(file_id), made.model_dump_json().encode())
        with self._lock:
            self._files[file_id] = made
        return made

    def delete(self, file_id: str) -> None:
        """
        Raises:
            ApiError: 404.
        """
        self.get(file_id)
        self._remove([file_id])

    def sweep(self, in_use: Collection[str], being_written: Collection[str] | None = None) -> None:
        """Deletes what has expired and is not in use; at the start, contents that nobody will finish too."""
        now = self._clock()
        with self._lock:
            known = list(self._files.values())
        gone = [one.id for one in known if one.expires_at is not None and one.expires_at <= now]
        self._remove([file_id for file_id in gone if file_id not in in_use])
        if being_written is not None:
            for file_id in ids_in(self._folder, FILE, ".jsonl") - self._files.keys() - set(being_written):
                self.content(file_id).unlink(missing_ok=True)

    def _remove(self, file_ids: Iterable[str]) -> None:
        for file_id in file_ids:
            with self._lock:
                self._files.pop(file_id, None)
            self._meta(file_id).unlink(missing_ok=True)  # first: without it the content is nobody's
            self.content(file_id).unlink(missing_ok=True)


def read_object(path: Path) -> FileObject | None:
    try:
        return FileObject.model_validate_json(read_whole(path))
    except ValidationError:
        return None


def no_room(message: str) -> ApiError:
    return ApiError(507, message, SERVER, code="no_room")
