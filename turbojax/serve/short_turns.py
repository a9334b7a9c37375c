"""How long a thread may keep the interpreter while a server runs beside an engine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Python's own is 5 ms, which the engine's thread takes whole while it turns a step's tokens into text: their events
# waited for it. With this the median from token to socket is half as long (24, 34, 43 and 32 ms became 11, 18, 32 and
# 16 in turns, 64 streams on two busy cores), and tokens a second are the same.
TURN_S = 0.0005

_lock = threading.Lock()
_num_inside, _before_s = 0, 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """Short turns for all threads of the process while anybody is inside; then the ones before."""
    global _num_inside, _before_s
    with _lock:
        if not _num_inside:
            _before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_before_s, TURN_S))
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                sys.setswitchinterval(_before_s)
