"""Conversations with a pipeline: each turn continues from the pages of those before it, as LMDeploy's sessions do."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from turbojax.configs import GenerationConfig
from turbojax.conversation import Conversation, Turn
from turbojax.engine.response import Response
from turbojax.engine.wants import stacked
from turbojax.errors import ConfigError
from turbojax.prompts import Message, Prompt

if TYPE_CHECKING:
    import numpy as np

    from turbojax.api import Pipeline

LISTS = ("token_ids", "logprobs", "processed_logprobs", "prompt_logprobs")


class Session:
    """A conversation, one turn after the other. Its pages are kept by the prefix cache, and it holds no slot between.

    A turn that fails leaves the conversation as it was. One that is left early (its stream is closed, its time is
    over) stays with what was said.

    Attributes:
        history: (prompt, text of the answer) of each turn.
        response: of the last turn; None before there is one, and while it streams.
        generator: pieces of the turn that streams; None once `finish` or `close` was called.
    """

    def __init__(self, pipe: Pipeline, conversation: Conversation, gen_config: GenerationConfig | None = None) -> None:
        self._pipe, self._conversation, self._gen_config = pipe, conversation, gen_config
        self.history: list[tuple[Prompt, str]] = []
        self.response: Response | None = None
        self.generator: Generator[Response, None, None] | None = None

    @property
    def messages(self) -> list[Message]:
        """The conversation as chat messages; empty where no chat template is used."""
        return list(self._conversation.messages)

    @property
    def token_ids(self) -> np.ndarray:
        """The conversation as the model has seen it, int32 [T]; without the token that ended the last answer."""
        return self._conversation.token_ids

    def __call__(
        self,
        prompt: Prompt,
        gen_config: GenerationConfig | None = None,
        stream_response: bool = True,
        *,
        do_preprocess: bool = True,
    ) -> Response | Generator[Response, None, None]:
        """The next turn: a stream of pieces, or its Response. See `Pipeline.chat`."""
        self.ask(prompt, gen_config, do_preprocess=do_preprocess)
        assert self.generator is not None
        return self.generator if stream_response else self.finish()

    def ask(self, prompt: Prompt, gen_config: GenerationConfig | None = None, *, do_preprocess: bool = True) -> None:
        """Begins a turn, of which `generator` gives the pieces. A turn that still streams is stopped."""
        self.close()
        config = gen_config or self._gen_config or GenerationConfig()
        if config.n != 1:
            raise ConfigError("GenerationConfig", "n", config.n, "1 in a session: a conversation goes one way")
        turn = self._conversation.ask(prompt, do_preprocess=do_preprocess)
        stream = self._pipe.stream_infer(turn.token_ids, config, do_preprocess=False)
        self.response, self.generator = None, self._answer(prompt, turn, stream, config)

    def finish(self) -> Response:
        """The Response of the turn that was begun, once all of it is there."""
        assert self.generator is not None, "no turn was begun"
        for _ in self.generator:
            pass
        self.generator = None
        assert self.response is not None
        return self.response

    def _answer(
        self, prompt: Prompt, turn: Turn, stream: Generator[Response, None, None], config: GenerationConfig
    ) -> Generator[Response, None, None]:
        pieces: list[Response] = []
        try:
            for piece in stream:
                pieces.append(piece)
                yield piece
        finally:
            stream.close()
            if pieces:
                self.response = response = joined(pieces)
                if response.finish_reason != "error":
                    self._conversation.answer(turn, response.token_ids, response.text, config.stop_token_ids)
                    self.history.append((prompt, response.text))

    def close(self) -> None:
        """Stops the turn that still streams; what it has said stays. The session can go on."""
        if self.generator is not None:
            self.generator.close()
            self.generator = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def joined(pieces: Sequence[Response]) -> Response:
    """The pieces of a stream as one Response."""
    lists: dict[str, Any] = {}
    for name in LISTS:
        parts = [part for piece in pieces if (part := getattr(piece, name)) is not None]
        lists[name] = [item for part in parts for item in part] if parts else None
    return dataclasses.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        logits=stacked(piece.logits for piece in pieces),
        last_hidden_state=stacked(piece.last_hidden_state for piece in pieces),
        num_cached_tokens=max(piece.num_cached_tokens for piece in pieces),
        **lists,
    )
