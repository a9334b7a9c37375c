"""One request of a session: from its pieces to LMDeploy's outputs, and back into the session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from turbojax.compat.messages import EngineOutput, GenerationConfig, ResponseType
from turbojax.compat.sessions import Sessions
from turbojax.engine.response import Response
from turbojax.session import joined

if TYPE_CHECKING:
    from turbojax.api import Pipeline
    from turbojax.call import Call

Deliver = Callable[[Response | None], None]
"""Takes pieces; None is the end of a request that was cancelled."""


class Turn:
    """A context: however it is left, the request ends and the session has its tokens.

    Attributes:
        is_done: the last output was given.
    """

    def __init__(
        self,
        pipe: Pipeline,
        sessions: Sessions,
        session_id: int,
        config: GenerationConfig,
        *,
        stream: bool | None,
        is_last: bool,
    ) -> None:
        """`stream` as an argument of the call; `is_last`: the session is forgotten afterwards."""
        self._pipe, self._sessions, self._session_id, self._is_last = pipe, sessions, session_id, is_last
        # LMDeploy's instances do not look at do_sample: what leaves it open samples.
        self._config = config.to_turbojax(samples=True)
        self._holds = (config.stream if stream is None else stream) is False
        self._stop_ids = {*(() if config.ignore_eos else pipe.eos_ids), *self._config.stop_token_ids}
        self._pieces: list[Response] = []
        self._prompt_ids: np.ndarray | None = None
        self._generated_ids: list[int] = []
        self._call: Call | None = None
        self._was_cancelled, self.is_done = False, False

    def start(
        self, input_ids: Sequence[int] | np.ndarray, deliver: Deliver, *, sequence_start: bool, step: int | None
    ) -> None:
        """Hands the request over; see `Sessions.begin` and `Pipeline.start` for what they raise."""

        def cancel() -> None:
            self._was_cancelled = True
            if self._call is not None:
                self._call.cancel()
            deliver(None)

        prompt_ids = self._sessions.begin(self._session_id, input_ids, cancel, sequence_start=sequence_start, step=step)
        self._prompt_ids = prompt_ids[: len(prompt_ids) - len(input_ids)]  # if it cannot start, the new ones go
        self._call = self._pipe.start(prompt_ids, self._config, deliver, do_preprocess=False)
        self._prompt_ids = prompt_ids
        if self._was_cancelled:  # by another thread, in between
            self._call.cancel()

    def outputs(self, piece: Response | None) -> list[EngineOutput]:
        """What a piece gives: an output, or none yet where all of it is to come at the end."""
        status = ResponseType.CANCEL if piece is None else status_of(piece)
        self.is_done = status is not ResponseType.SUCCESS
        if piece is not None:
            assert self._call is not None
            self._call.hear(piece)
            self._pieces.append(piece)
        if self._holds and not self.is_done:
            return []
        pieces, self._pieces = self._pieces, []
        return [self._output(status, joined(pieces) if pieces else Response(""))]

    def _output(self, status: ResponseType, found: Response) -> EngineOutput:
        ids = found.token_ids
        is_stop = found.finish_reason == "stop" and ids and ids[-1] in self._stop_ids
        if is_stop and not self._config.include_stop_str_in_output:
            ids = ids[:-1]
        self._generated_ids += ids
        logprobs = None if found.logprobs is None else found.logprobs[: len(ids)]
        return EngineOutput(
            status, ids, len(self._generated_ids), logprobs, found.logits, found.last_hidden_state, found.error
        )

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._prompt_ids is not None:
            known = np.concatenate([self._prompt_ids, np.asarray(self._generated_ids, np.int32)])
            self._sessions.finish(self._session_id, known, is_last=self._is_last)


def status_of(piece: Response) -> ResponseType:
    """How a request stands after a piece."""
    if piece.finish_reason is None:
        return ResponseType.SUCCESS
    return ResponseType.INTERNAL_ENGINE_ERROR if piece.finish_reason == "error" else ResponseType.FINISH
