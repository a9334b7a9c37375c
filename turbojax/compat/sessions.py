"""What an engine remembers of its sessions: their tokens, and the request that runs in one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from turbojax.errors import InvalidPromptError, RequestError
from turbojax.rules import is_int


class SessionError(RequestError):
    """A session is not there to be continued, or still runs."""


def no_tokens() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclass
class Session:
    """Tokens so far, int32 [T], without the token that ended the last answer; and how to cancel what runs."""

    token_ids: np.ndarray = field(default_factory=no_tokens)
    cancel: Callable[[], None] | None = None


class Sessions:
    """By session id; any thread may ask. Pages are none of theirs: the prefix cache finds them by the tokens."""

    def __init__(self) -> None:
        self._sessions: dict[int, Session] = {}
        self._lock = threading.Lock()

    def begin(
        self,
        session_id: int,
        input_ids: Sequence[int] | np.ndarray,
        cancel: Callable[[], None],
        *,
        sequence_start: bool,
        step: int | None,
    ) -> np.ndarray:
        """The tokens to go on from, int32 [T]: those of the session, up to `step`, and new ones.

        Args:
            session_id: of the session.
            input_ids: new tokens.
            cancel: ends the request that begins.
            sequence_start: the session is a new one; another one of that id is forgotten.
            step: tokens of the session that stay; None is all.

        Raises:
            SessionError: there is no such session, it has fewer tokens, or a request of it still runs.
            InvalidPromptError: the new tokens are none.
        """
        new = flat(input_ids)
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None and session.cancel is not None:
                raise SessionError(f"session {session_id}: a request of it still runs; cancel it, or take another id")
            if sequence_start:
                session = self._sessions[session_id] = Session()
            elif session is None:
                raise SessionError(f"session {session_id} is not there to be continued: give sequence_start=True")
            if step is not None and not is_int(step, 0, len(session.token_ids)):
                raise SessionError(f"session {session_id}: step {step!r}, accepted: 0 .. {len(session.token_ids)}")
            session.cancel = cancel
            return np.concatenate([session.token_ids[:step], new])

    def finish(self, session_id: int, token_ids: np.ndarray, *, is_last: bool) -> None:
        """The request of a session has ended, with these tokens in all; after the last one it is forgotten."""
        with self._lock:
            if is_last:
                self._sessions.pop(session_id, None)
            elif session_id in self._sessions:  # which `end` may have forgotten meanwhile
                self._sessions[session_id] = Session(token_ids)

    def cancel(self, session_id: int) -> None:
        """Ends the request of a session, if one runs; what it has generated stays."""
        with self._lock:
            session = self._sessions.get(session_id)
            cancel = None if session is None else session.cancel
        if cancel is not None:
            cancel()

    def end(self, session_id: int) -> None:
        """Forgets a session; a request of it is cancelled."""
        self.cancel(session_id)
        with self._lock:
            self._sessions.pop(session_id, None)


def flat(input_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids, int32 [T].

    Raises:
        InvalidPromptError: something else, a batch of them too.
    """
    ids = np.asarray(input_ids)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise InvalidPromptError(
            f"input_ids are {ids.dtype} {list(ids.shape)}; accepted: token ids of one sequence, at least one"
        )
    return ids.astype(np.int32)
