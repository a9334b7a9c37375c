"""LMDeploy's engine: `TurboMind.from_pretrained(...).create_instance().stream_infer(...)`, and its async twins."""

from __future__ import annotations

import asyncio
import functools
import queue
from collections.abc import AsyncGenerator, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from turbojax.compat.messages import EngineOutput, GenerationConfig, TurbomindEngineConfig
from turbojax.compat.sessions import Sessions
from turbojax.compat.tokenizer import Tokenizer
from turbojax.compat.turn import Turn
from turbojax.engine.response import Response
from turbojax.errors import MissingTokenizerError
from turbojax.postbox import Postbox

if TYPE_CHECKING:
    from turbojax.api import Pipeline

TokenIds = Sequence[int] | np.ndarray


class TurboMind:
    """An engine. Close it, or use it as a context.

    Attributes:
        engine_config: what it was asked to be.
        model_name: what the model is called: as the config says, else its file's or folder's name.
    """

    def __init__(
        self, model_path: str | Path, model_name: str | None = None, engine_config: TurbomindEngineConfig | None = None
    ) -> None:
        """Loads a model; see `turbojax.pipeline`."""
        from turbojax.api import pipeline

        self.engine_config = engine_config or TurbomindEngineConfig()
        self.model_name = model_name or self.engine_config.model_name or Path(model_path).name
        self.pipe: Pipeline = pipeline(model_path, self.engine_config.to_turbojax())
        self.sessions = Sessions()

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        model_name: str | None = None,
        engine_config: TurbomindEngineConfig | None = None,
    ) -> TurboMind:
        """Of a folder, a .gguf file or a Hugging Face repo id."""
        return cls(pretrained_model_name_or_path, model_name, engine_config)

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back.

        Raises:
            MissingTokenizerError: the model has none.
        """
        if self.pipe.tokenizer is None:
            raise MissingTokenizerError(f"{self.model_name}: the model has no tokenizer; give token ids")
        return Tokenizer(self.pipe.tokenizer)

    @property
    def session_len(self) -> int:
        """Most tokens of a sequence, prompt and generated."""
        return self.pipe.session_len

    def create_instance(self) -> TurboMindInstance:
        """Something to stream from; all of them share the engine and its sessions."""
        return TurboMindInstance(self)

    def close(self) -> None:
        """Ends what runs and stops the engine."""
        self.pipe.close()

    def __enter__(self) -> TurboMind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TurboMindInstance:
    """Streams of one engine.

    A request that cannot run raises what `turbojax.Pipeline` raises; one that fails later ends with an
    `EngineOutput` whose status says so.
    """

    def __init__(self, tm_model: TurboMind) -> None:
        self.tm_model = tm_model

    def stream_infer(
        self,
        session_id: int,
        input_ids: TokenIds,
        gen_config: GenerationConfig | None = None,
        *,
        sequence_start: bool = True,
        sequence_end: bool = False,
        step: int | None = None,
        stream_output: bool | None = None,
    ) -> Generator[EngineOutput, None, None]:
        """Yields new tokens as they come; leaving it ends the request.

        Args:
            session_id: of a conversation; one request of it runs at a time.
            input_ids: tokens of the prompt.
            gen_config: how to generate.
            sequence_start: a new session begins; False goes on behind what the session has.
            sequence_end: the session is forgotten at the end.
            step: tokens of the session that stay, where one is continued; None is all.
            stream_output: False gives one output, at the end. None is as `gen_config.stream` says, else True.

        Raises:
            RequestError, ConfigError, QueueFullError, EngineClosedError, EngineFailedError: with the first output.
        """
        inbox: queue.SimpleQueue[Response | None] = queue.SimpleQueue()
        with self._turn(session_id, gen_config, stream_output, sequence_end) as turn:
            turn.start(input_ids, inbox.put, sequence_start=sequence_start, step=step)
            while not turn.is_done:
                yield from turn.outputs(inbox.get())

    async def async_stream_infer(
        self,
        session_id: int,
        input_ids: TokenIds,
        gen_config: GenerationConfig | None = None,
        *,
        sequence_start: bool = True,
        sequence_end: bool = False,
        step: int | None = None,
        stream_output: bool | None = None,
    ) -> AsyncGenerator[EngineOutput, None]:
        """The async twin of `stream_infer`; a cancelled task ends its request."""
        inbox, postbox = asyncio.Queue[Response | None](), Postbox.here()
        deliver = functools.partial(postbox.post, inbox.put_nowait)
        with self._turn(session_id, gen_config, stream_output, sequence_end) as turn:
            turn.start(input_ids, deliver, sequence_start=sequence_start, step=step)
            while not turn.is_done:
                for output in turn.outputs(await inbox.get()):
                    yield output

    def _turn(self, session_id: int, config: GenerationConfig | None, stream: bool | None, is_last: bool) -> Turn:
        mind = self.tm_model
        return Turn(mind.pipe, mind.sessions, session_id, config or GenerationConfig(), stream=stream, is_last=is_last)

    def cancel(self, session_id: int) -> None:
        """Ends the request of a session, from any thread: its stream ends with `ResponseType.CANCEL`."""
        self.tm_model.sessions.cancel(session_id)

    def end(self, session_id: int) -> None:
        """Forgets a session, and cancels a request of it."""
        self.tm_model.sessions.end(session_id)

    async def async_cancel(self, session_id: int) -> None:
        """The async twin of `cancel`."""
        self.cancel(session_id)

    async def async_end(self, session_id: int) -> None:
        """The async twin of `end`."""
        self.end(session_id)
