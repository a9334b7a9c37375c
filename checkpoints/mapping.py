"""Files mapped into memory, read-only: pages are read when they are touched, and can be given back."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np


def mapped(path: Path) -> np.ndarray:
    """The bytes of a file, uint8, as a view of its mapping.

    Raises:
        OSError, ValueError: the file cannot be opened, or is empty.
    """
    return np.memmap(path, np.uint8, "r").view(np.ndarray)


def give_back(file: np.ndarray) -> None:
    """Takes the pages of a `mapped` file out of this process's memory; whoever touches them gets them again."""
    mapping = file.base
    if isinstance(mapping, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapping._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]  # numpy has no other name for it
