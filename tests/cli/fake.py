"""A pipeline that answers a prompt with its words in upper case, a word a token, without a model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from turbojax.configs import EngineConfig, GenerationConfig
from turbojax.engine.response import Response
from turbojax.errors import EngineFailedError, TurbojaxError


@dataclass
class FakePipeline:
    """Records its calls. A prompt "fail" gives a response with an error, "raise" raises, "slow" takes long."""

    model: str | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    calls: list[tuple[Any, GenerationConfig, bool]] = field(default_factory=list)
    is_closed: bool = False
    num_cancelled: int = 0

    @property
    def max_batch_size(self) -> int:
        return self.config.max_batch_size or 4

    def __call__(
        self, prompt: Any, gen_config: GenerationConfig, *, do_preprocess: bool = True
    ) -> Response | list[Response]:
        self.calls.append((prompt, gen_config, do_preprocess))
        if prompt == "lost":
            raise EngineFailedError("the device is lost: no device")
        if prompt == "raise":
            raise TurbojaxError("the prompt has 9 tokens, session_len is 8")
        if prompt == "fail":
            return Response("", [], "error", 1, 0, error="out of pages")
        while prompt == "slow" and not self.is_closed:
            time.sleep(0.01)
        if prompt == "slow":
            raise TurbojaxError("the pipeline is closed")
        words = words_of(prompt)[: gen_config.max_new_tokens]
        num = len(words)
        logprobs = None if gen_config.logprobs is None else [{i: -1.0} for i in range(num)]
        response = Response(" ".join(words), list(range(num)), "stop", num, num, logprobs=logprobs)
        return response if gen_config.n == 1 else [response] * gen_config.n

    def stream_infer(
        self, prompt: Any, gen_config: GenerationConfig, *, do_preprocess: bool = True
    ) -> Iterator[Response]:
        self.calls.append((prompt, gen_config, do_preprocess))
        words = words_of(prompt)[: gen_config.max_new_tokens]
        num_yielded = 0
        try:
            for i, word in enumerate(words):
                if word == "INTERRUPT":
                    raise KeyboardInterrupt
                if word == "LOST":
                    raise EngineFailedError("the device is lost: no device")
                if word == "FAIL":
                    yield Response("", [], "error", len(words), i, error="out of pages")
                    return
                text = word if i == 0 else f" {word}"
                reason = "stop" if i + 1 == len(words) else None
                yield Response(text, [i], reason, len(words), i + 1)
                num_yielded += 1
        finally:
            self.num_cancelled += num_yielded < len(words)

    def session(self, gen_config: GenerationConfig) -> FakeSession:
        return FakeSession(self, gen_config)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeSession:
    """A conversation whose pipeline is sent all messages in every turn."""

    pipe: FakePipeline
    gen_config: GenerationConfig
    history: list[tuple[Any, str]] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    generator: Iterator[Response] | None = None

    def ask(self, prompt: list[dict[str, str]]) -> None:
        self.generator = self._answer(prompt)

    def _answer(self, prompt: list[dict[str, str]]) -> Iterator[Response]:
        texts, is_kept = list[str](), True
        try:
            for piece in self.pipe.stream_infer([*self.messages, *prompt], self.gen_config):
                texts.append(piece.text)
                is_kept = piece.error is None
                yield piece
        finally:
            if texts and is_kept:
                self.messages += [*prompt, {"role": "assistant", "content": "".join(texts)}]
                self.history.append((prompt, "".join(texts)))


def words_of(prompt: Any) -> list[str]:
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        prompt = prompt[-1]["content"]
    if isinstance(prompt, list):
        prompt = " ".join(map(str, prompt))
    return prompt.upper().split()


def opener(pipes: list[FakePipeline]) -> Any:
    """A stand-in for `session.open_pipeline` that appends what it opens to `pipes`."""

    @contextmanager
    def open_pipeline(model: str | None, config: EngineConfig, shown: Any = None) -> Iterator[FakePipeline]:
        pipe = FakePipeline(model, config)
        pipes.append(pipe)
        try:
            yield pipe
        finally:
            pipe.close()

    return open_pipeline
