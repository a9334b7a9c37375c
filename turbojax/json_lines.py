"""A file of JSON records that survives an interruption: each is written whole before the next is begun."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from turbojax.errors import TurbojaxError

COPY_BYTES = 1 << 20
Key = TypeVar("Key", bound=Hashable)


class RecordFileError(TurbojaxError):
    """A file of records cannot be read or written."""


class ForeignRecordError(RecordFileError):
    """A file holds what is none of its records."""


class RecordFile(Generic[Key]):
    """Records, each with a key. Opening the file again drops what was not written to its end.

    Attributes:
        finished: keys of the records that the file has.
    """

    def __init__(self, path: Path, key_of: Callable[[Any], Key | None]) -> None:
        """Opens the file to go on with it.

        Args:
            path: is made where it is not there.
            key_of: the key of a record; None drops the record, ValueError says that it is none of this file's.

        Raises:
            ForeignRecordError: it holds something else.
            RecordFileError: it cannot be written.
        """
        self.path, self._key_of = path, key_of
        self.finished: set[Key] = set()
        kept = self._read_finished() if path.is_file() else None
        try:
            if kept is not None:
                self._rewrite(kept)
            # Unbuffered: what append() returned from is with the operating system.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise RecordFileError(f"cannot write {path}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def _read_finished(self) -> list[range]:
        """Collects the finished keys; returns where their records stand, as runs of bytes."""
        kept: list[range] = []
        start = 0
        with self.path.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if not raw.endswith(b"\n"):  # was not written to its end
                    break
                end = start + len(raw)
                key = self._key(number, raw)
                if key is not None:
                    self.finished.add(key)
                    if kept and kept[-1].stop == start:
                        kept[-1] = range(kept[-1].start, end)
                    else:
                        kept.append(range(start, end))
                start = end
        return kept

    def _key(self, number: int, raw: bytes) -> Key | None:
        try:
            return self._key_of(json.loads(raw))
        except (ValueError, RecursionError) as error:
            why = "no JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else error
            raise ForeignRecordError(f"{self.path}, line {number} is {why}") from error

    def _rewrite(self, kept: list[range]) -> None:
        """Leaves only these bytes; a file that must lose some from its middle is replaced in one go."""
        if len(kept) <= 1 and (not kept or kept[0].start == 0):
            os.truncate(self.path, kept[0].stop if kept else 0)
            return
        clean = self.path.with_name(self.path.name + ".tmp")
        try:
            with self.path.open("rb") as old, clean.open("wb") as new:
                for run in kept:
                    old.seek(run.start)
                    for start in range(run.start, run.stop, COPY_BYTES):
                        new.write(old.read(min(COPY_BYTES, run.stop - start)))
            clean.replace(self.path)
        except OSError:
            clean.unlink(missing_ok=True)
            raise

    def append(self, record: dict[str, Any]) -> None:
        """Writes a record.

        Raises:
            RecordFileError: the disk is full, for example; what was appended before is safe.
        """
        # A lone surrogate cannot be encoded; as an escape it is what JSON makes of it.
        rest = memoryview((json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise RecordFileError(
                f"cannot write {self.path}: {error.strerror}; what it holds is safe, the same command goes on"
            ) from error
        key = self._key_of(record)
        if key is not None:
            self.finished.add(key)

    def sync(self) -> None:
        """What was appended survives the machine too."""
        os.fsync(self._file.fileno())
