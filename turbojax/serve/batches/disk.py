"""The folder that files and batches are kept in: names made here alone, writes that are whole or not there."""

from __future__ import annotations

import fcntl
import os
import re
import uuid
from pathlib import Path
from typing import IO

from turbojax.errors import TurbojaxError

FILE, BATCH = "file-", "batch_"
ID = re.compile(rf"(?:{FILE}|{BATCH})[0-9a-f]{{32}}")


class BatchFolderError(TurbojaxError):
    """The folder of --batch-dir cannot be used."""


def new_id(kind: str) -> str:
    """A name that nobody guesses and that is safe as a file's."""
    return f"{kind}{uuid.uuid4().hex}"


def write_whole(path: Path, data: bytes) -> None:
    """Puts a file in place at once: whoever reads it, even after a crash, has all of it or what was there before."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read_whole(path: Path) -> bytes:
    """What `write_whole` has put in place.

    Raises:
        BatchFolderError: it cannot be read; to go on without it would be to lose it.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise BatchFolderError(f"{path} cannot be read: {error.strerror}") from error


class Folder:
    """A folder that one server holds at a time.

    Attributes:
        files: where contents are, <id>.jsonl, beside what is known of them, <id>.json.
        batches: where batches are, <id>.json.
    """

    def __init__(self, path: Path) -> None:
        """Makes the folder where it is not there, and takes it.

        Raises:
            BatchFolderError: it cannot be written, or another server has it.
        """
        self.files, self.batches = path / "files", path / "batches"
        self._lock: IO[bytes] | None = None
        try:
            for folder in (path, self.files, self.batches):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (path / "lock").open("wb")
        except OSError as error:
            raise BatchFolderError(f"--batch-dir {path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise BatchFolderError(f"--batch-dir {path} is in use by another server") from error
        self._lock = lock

    def close(self) -> None:
        """Lets others take it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def check_folder(path: str | None) -> None:
    """Before a model is loaded: a server could take the folder.

    Raises:
        BatchFolderError: it cannot be written, or another server has it.
    """
    if path is not None:
        Folder(Path(path)).close()


def ids_in(folder: Path, kind: str, suffix: str) -> set[str]:
    """Names in a folder that were made by `new_id`; parts that were never finished are deleted."""
    for part in folder.glob("*.part"):
        part.unlink(missing_ok=True)
    found = {path.name.removesuffix(suffix) for path in folder.iterdir() if path.name.endswith(suffix)}
    return {name for name in found if name.startswith(kind) and ID.fullmatch(name)}
