"""The Python API: prompts in, responses out; one call, a stream, or their async twins, from any number of threads."""

from __future__ import annotations

import asyncio
import itertools
import queue
import secrets
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from turbojax.configs import MAX_STOP_IDS, EngineConfig, GenerationConfig
from turbojax.engine.loop import EngineLoop
from turbojax.engine.metrics import EngineMetrics
from turbojax.engine.plan import Runner, SamplingParams
from turbojax.engine.request import Request
from turbojax.engine.scheduler import Scheduler
from turbojax.engine.text import Response, TextSink
from turbojax.errors import ConfigError
from turbojax.prompts import Prompt, as_list, encode, is_one_prompt

if TYPE_CHECKING:
    import numpy as np

    from turbojax.memory import MemoryPlan
    from turbojax.tokenizer import Tokenizer

Prompts = Prompt | Sequence[Prompt]
GenConfigs = GenerationConfig | Sequence[GenerationConfig] | None
Deliver = Callable[[Response], None]


class Pipeline:
    """Generates for prompts on one engine. Safe to call from several threads; close it, or use it as a context.

    A call takes one prompt (a text, chat messages, token ids) or a list of them, and one GenerationConfig or one for
    each prompt. If any prompt of a call is invalid, the call raises before anything starts; what fails later comes as
    a Response with finish reason `error`.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        memory: MemoryPlan | None = None,
    ) -> None:
        self._scheduler, self._tokenizer = scheduler, tokenizer
        self._vocab_size, self._eos_ids = vocab_size, tuple(eos_ids)
        self._request_ids = itertools.count()
        self.memory = memory  # what weights, KV pool and steps take, of a pipeline on a device
        self._loop = EngineLoop(scheduler, runner)
        # The engine's thread would keep the weights of a pipeline that was dropped without being closed.
        self._finalizer = weakref.finalize(self, self._loop.close)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @property
    def session_len(self) -> int:
        """Most tokens of a sequence, prompt and generated."""
        return self._scheduler.max_len

    @property
    def max_batch_size(self) -> int:
        """Sequences that run at once."""
        return self._scheduler.config.num_slots

    @property
    def metrics(self) -> EngineMetrics:
        """What the engine has counted so far."""
        return self._scheduler.metrics

    # -- calls --------------------------------------------------------------------------------------------

    def __call__(
        self, prompts: Prompts, gen_config: GenConfigs = None, *, do_preprocess: bool = True
    ) -> Response | list[Response]:
        """Generates, and returns when all is done: a Response for one prompt, a list for a list.

        Args:
            prompts: one prompt or a list.
            gen_config: how to generate; one for all, or one for each.
            do_preprocess: a text becomes the user's message of a chat, where the model has a chat template.

        Raises:
            RequestError, ConfigError: a prompt or a field is invalid; names the prompt's index.
            EngineClosedError: the pipeline is closed.
            EngineFailedError: the engine cannot go on; requests that it had have ended with the same error.
        """
        outbox: queue.SimpleQueue[Response] = queue.SimpleQueue()
        requests = self._requests(prompts, gen_config, do_preprocess, outbox.put, whole=True)
        responses = sorted(self._stream(requests, outbox.get), key=lambda response: response.index)
        return responses[0] if is_one_prompt(prompts) else responses

    def stream_infer(
        self, prompts: Prompts, gen_config: GenConfigs = None, *, do_preprocess: bool = True
    ) -> Generator[Response, None, None]:
        """Yields pieces as they come, of all prompts interleaved; see `__call__`. Closing it cancels the rest."""
        outbox: queue.SimpleQueue[Response] = queue.SimpleQueue()
        requests = self._requests(prompts, gen_config, do_preprocess, outbox.put)
        return self._stream(requests, outbox.get)

    def _stream(self, requests: list[Request], receive: Callable[[], Response]) -> Generator[Response, None, None]:
        unfinished = dict(enumerate(requests))
        try:
            for request in requests:
                self._loop.submit(request)
            while unfinished:
                piece = receive()
                if piece.finish_reason is not None:
                    del unfinished[piece.index]
                yield piece
        finally:
            for request in unfinished.values():
                self._loop.cancel(request)

    async def agenerate(
        self, prompts: Prompts, gen_config: GenConfigs = None, *, do_preprocess: bool = True
    ) -> Response | list[Response]:
        """The async twin of `__call__`."""
        stream = self._astream(prompts, gen_config, do_preprocess, whole=True)
        responses = sorted([response async for response in stream], key=lambda response: response.index)
        return responses[0] if is_one_prompt(prompts) else responses

    def astream_infer(
        self, prompts: Prompts, gen_config: GenConfigs = None, *, do_preprocess: bool = True
    ) -> AsyncGenerator[Response, None]:
        """The async twin of `stream_infer`; a cancelled task cancels its requests."""
        return self._astream(prompts, gen_config, do_preprocess)

    async def _astream(
        self, prompts: Prompts, gen_config: GenConfigs, do_preprocess: bool, *, whole: bool = False
    ) -> AsyncGenerator[Response, None]:
        event_loop, outbox = asyncio.get_running_loop(), asyncio.Queue[Response]()

        def deliver(piece: Response) -> None:
            event_loop.call_soon_threadsafe(outbox.put_nowait, piece)

        requests = self._requests(prompts, gen_config, do_preprocess, deliver, whole=whole)
        unfinished = dict(enumerate(requests))
        try:
            for request in requests:
                self._loop.submit(request)
            while unfinished:
                piece = await outbox.get()
                if piece.finish_reason is not None:
                    del unfinished[piece.index]
                yield piece
        finally:
            for request in unfinished.values():
                self._loop.cancel(request)

    # -- requests -----------------------------------------------------------------------------------------

    def _requests(
        self, prompts: Prompts, gen_config: GenConfigs, do_preprocess: bool, deliver: Deliver, *, whole: bool = False
    ) -> list[Request]:
        """One request a prompt, all of them checked; `whole` ones deliver one piece."""
        many = as_list(prompts)
        configs = one_for_each(gen_config, len(many))
        requests = []
        for index, (prompt, config) in enumerate(zip(many, configs, strict=True)):
            name = "the prompt" if len(many) == 1 else f"prompt {index}"
            ids = encode(prompt, self._tokenizer, self._vocab_size, name, do_preprocess=do_preprocess)
            self._scheduler.check(len(ids), name)
            requests.append(self._request(ids, config, index, deliver, whole))
        return requests

    def _request(self, ids: np.ndarray, config: GenerationConfig, index: int, deliver: Deliver, whole: bool) -> Request:
        stop_ids = (*(() if config.ignore_eos else self._eos_ids), *config.stop_token_ids)
        stop_ids = tuple(dict.fromkeys(stop_ids))
        if len(stop_ids) > MAX_STOP_IDS:
            accepted = f"at most {MAX_STOP_IDS} together with the model's {len(self._eos_ids)} end-of-sequence tokens"
            raise ConfigError("GenerationConfig", "stop_token_ids", config.stop_token_ids, accepted)
        return Request(
            request_id=next(self._request_ids),
            prompt_ids=ids,
            sampling=sampling_of(config),
            stop_token_ids=stop_ids,
            max_len=len(ids) + config.max_new_tokens,
            min_len=len(ids) + config.min_new_tokens,
            sink=TextSink(
                deliver,
                self._decoder(config),
                stop_words=config.stop_words,
                stop_token_ids=stop_ids,
                min_new_tokens=config.min_new_tokens,
                num_input_tokens=len(ids),
                index=index,
                whole=whole,
            ),
        )

    def _decoder(self, config: GenerationConfig) -> Callable[[Sequence[int]], str] | None:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=config.skip_special_tokens)

    # -- end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends what runs (with an error) and stops the engine; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def one_for_each(gen_config: GenConfigs, num_prompts: int) -> list[GenerationConfig]:
    """A config for each prompt.

    Raises:
        ConfigError: a list of another length.
    """
    if gen_config is None or isinstance(gen_config, GenerationConfig):
        return [gen_config or GenerationConfig()] * num_prompts
    configs = list(gen_config)
    if len(configs) != num_prompts:
        raise ConfigError(
            "call", "gen_config", f"{len(configs)} configs", f"one, or {num_prompts}, one for each prompt"
        )
    return configs


def sampling_of(config: GenerationConfig) -> SamplingParams:
    """The device's view of a config; a request without a seed draws its own."""
    if config.is_greedy:
        return SamplingParams()
    seed = secrets.randbits(32) if config.random_seed is None else config.random_seed
    return SamplingParams(config.temperature, config.top_k, config.top_p, config.min_p, seed)


def pipeline(model: str | Path | None = None, backend_config: EngineConfig | None = None) -> Pipeline:
    """Loads a model and returns a pipeline on it.

    Where the process has not set `jax_compilation_cache_dir`, it becomes a folder in the user's cache: compiled steps
    are kept there.

    Args:
        model: a folder, a .gguf file, or a Hugging Face repo id; None is the embedded default model.
        backend_config: how the engine runs.

    Raises:
        TurbojaxError, CheckpointError: one line that says what is wrong with the model or the config.
    """
    from turbojax.assembly import assemble, eos_ids
    from turbojax.hub import resolve_model
    from turbojax.tokenizer import load_tokenizer

    path = resolve_model(model)
    parts = assemble(path, backend_config or EngineConfig())
    return Pipeline(
        parts.runner,
        parts.scheduler,
        load_tokenizer(path),
        vocab_size=parts.model.spec.vocab_size,
        eos_ids=eos_ids(parts.model.config, parts.model.generation_config),
        memory=parts.memory,
    )
