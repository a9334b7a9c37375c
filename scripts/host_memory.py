"""What a process holds of the host's memory at most, while something runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

INTERVAL_S = 0.01


def status_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes: RssAnon is what the process needs, VmRSS has mapped files too."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


@contextmanager
def peaks_of(measures: Mapping[str, Callable[[], int]]) -> Iterator[dict[str, int]]:
    """The most that each measure has been meanwhile, looking every 10 ms."""
    done, peaks = threading.Event(), dict.fromkeys(measures, 0)

    def watch() -> None:
        while not done.wait(INTERVAL_S):
            for name, measure in measures.items():
                peaks[name] = max(peaks[name], measure())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()
