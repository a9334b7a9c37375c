"""What every route shares: the pipeline, its names, and one way to run a request."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from fastapi import Request

from turbojax.chat_template import read_chat_template
from turbojax.engine.response import Response
from turbojax.errors import ConfigError
from turbojax.serve.gate import Gate
from turbojax.serve.metrics import ServerMetrics
from turbojax.serve.observed import observed
from turbojax.serve.parsing import Styles, chosen_styles, detect_styles
from turbojax.serve.settings import ServeConfig
from turbojax.serve.token_texts import TokenTexts

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
        gate: who is being answered.
        metrics: what /metrics shows.
        tokenizer: of the model, with the server's chat template where it has one.
    """

    pipe: Pipeline
    config: ServeConfig
    model_name: str
    created: int = field(default_factory=lambda: int(time.time()))
    gate: Gate = field(init=False)
    metrics: ServerMetrics = field(init=False)
    tokenizer: Tokenizer | None = field(init=False)

    def __post_init__(self) -> None:
        self.gate = Gate(self.config.max_concurrent_requests)
        self.metrics = ServerMetrics(self.pipe, self.gate, self.model_name)
        self.tokenizer = tokenizer_of(self.pipe, self.config)

    @property
    def is_draining(self) -> bool:
        """No new requests are taken; those that run end."""
        return self.gate.is_draining

    @cached_property
    def styles(self) -> Styles:
        """How the model writes tool calls and reasoning."""
        detected = detect_styles(None if self.tokenizer is None else self.tokenizer.chat_template)
        return chosen_styles(self.config.tool_call_parser, self.config.reasoning_parser, detected)

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The tokens one by one."""
        return TokenTexts(self.tokenizer)

    def stream(
        self,
        prompt: Prompts,
        gen_config: GenConfigs,
        *,
        request_id: str,
        user: str | None = None,
        do_preprocess: bool = False,
    ) -> AsyncGenerator[Response, None]:
        """Pieces of the answers as they come, of all prompts and samples; closing it cancels what still runs.

        Each call is counted, and logged under its `request_id` with the `user` that its client names.

        Raises:
            RequestError, ConfigError, QueueFullError, EngineClosedError, EngineFailedError: before the first piece.
        """
        pieces = self.pipe.astream_infer(prompt, gen_config, do_preprocess=do_preprocess)
        return observed(pieces, self.metrics.requests, request_id, user)


def tokenizer_of(pipe: Pipeline, config: ServeConfig) -> Tokenizer | None:
    """The model's tokenizer; a chat template from a file is read here, and never again.

    Raises:
        ConfigError: the file holds no template, or the model has no tokenizer to use it.
    """
    if config.chat_template is None:
        return pipe.tokenizer
    if pipe.tokenizer is None:
        accepted = "None: the model has no tokenizer"
        raise ConfigError("ServeConfig", "chat_template", config.chat_template, accepted)
    return pipe.tokenizer.with_chat_template(read_chat_template(config.chat_template))


async def service_of(request: Request) -> Service:
    """The service of the app that a request came to; routes depend on it. (Not async, it would cost a thread each.)"""
    service: Service = request.app.state.service
    return service
