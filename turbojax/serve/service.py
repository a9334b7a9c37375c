"""What every route shares: the pipeline, its names, and one way to run a request."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request

from turbojax.engine.response import Response
from turbojax.serve.settings import ServeConfig

if TYPE_CHECKING:
    from turbojax.api import Pipeline
    from turbojax.request_builder import GenConfigs, Prompts
    from turbojax.tokenizer import Tokenizer


@dataclass
class Service:
    """One model behind HTTP; routes find it as `request.app.state.service`.

    Attributes:
        pipe: the engine; whoever made the service closes it.
        config: of the server.
        model_name: what clients call the model.
        created: when it was made, in seconds since 1970.
        is_draining: no new requests are taken; those that run end.
    """

    pipe: Pipeline
    config: ServeConfig
    model_name: str
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.pipe.tokenizer

    async def stream(
        self, prompt: Prompts, gen_config: GenConfigs, *, request_id: str, do_preprocess: bool = False
    ) -> AsyncGenerator[Response, None]:
        """Pieces of the answers as they come, of all prompts and samples; closing it cancels what still runs.

        Raises:
            RequestError, ConfigError, QueueFullError, EngineClosedError, EngineFailedError: before the first piece.
        """
        del request_id  # for the request's log line
        pieces = self.pipe.astream_infer(prompt, gen_config, do_preprocess=do_preprocess)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()


def service_of(request: Request) -> Service:
    """The service of the app that a request came to; routes depend on it."""
    service: Service = request.app.state.service
    return service
