"""The Python API: prompts in, responses out; one call, a stream, or their async twins, from any number of threads."""

from __future__ import annotations

import asyncio
import functools
import operator
import queue
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from turbojax.call import Call, Requests, in_order
from turbojax.configs import EngineConfig, GenerationConfig
from turbojax.conversation import Conversation
from turbojax.engine.loop import EngineLoop
from turbojax.engine.metrics import EngineMetrics, EngineStatus
from turbojax.engine.plan import Runner
from turbojax.engine.replicas import Replicas
from turbojax.engine.response import Response
from turbojax.engine.scheduler import Scheduler
from turbojax.generation import model_defaults
from turbojax.outbox import Outbox
from turbojax.postbox import Postbox
from turbojax.prompts import Prompt
from turbojax.request_builder import GenConfigs, Prompts, RequestBuilder, takes_long
from turbojax.scores import mean_losses
from turbojax.session import Session

if TYPE_CHECKING:
    from turbojax.memory import MemoryPlan
    from turbojax.models.model import Model
    from turbojax.processors import LogitsProcessor
    from turbojax.tokenizer import Tokenizer


class Pipeline:
    """Generates for prompts on an engine, or on several alike. Threads may share it; close it, or use it as a context.

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
        defaults: Mapping[str, Any] | None = None,
        processors: Mapping[str, LogitsProcessor] | None = None,
        memory: MemoryPlan | None = None,
        replicas: Sequence[tuple[Runner, Scheduler]] = (),
    ) -> None:
        """Takes the parts of an engine.

        `defaults` are the model's own sampling values (see `turbojax.generation.model_defaults`), `replicas` the parts
        of further engines of the same config.
        """
        self._scheduler, self._tokenizer = scheduler, tokenizer
        self._schedulers = [scheduler, *(other for _, other in replicas)]
        self._builder = RequestBuilder(
            scheduler, tokenizer, vocab_size=vocab_size, eos_ids=eos_ids, defaults=defaults or {},
            processors=processors or {},
        )  # fmt: skip
        self._vocab_size, self._eos_ids = vocab_size, tuple(eos_ids)
        self.sampling_defaults = dict(defaults or {})  # those fields of GenerationConfig that the model recommends
        self.memory = memory  # what weights, KV pool and steps take, of a pipeline on a device
        loops = [EngineLoop(scheduler, runner) for runner, scheduler in ((runner, scheduler), *replicas)]
        self._loop = Replicas(loops) if replicas else loops[0]
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
    def eos_ids(self) -> tuple[int, ...]:
        """The model's own end-of-sequence tokens."""
        return self._eos_ids

    @property
    def max_batch_size(self) -> int:
        """Sequences that run at once."""
        return sum(scheduler.config.num_slots for scheduler in self._schedulers)

    @property
    def metrics(self) -> EngineMetrics:
        """What the engine has counted so far; of several, all of them together until now."""
        return functools.reduce(operator.add, [scheduler.metrics for scheduler in self._schedulers])

    @property
    def status(self) -> EngineStatus:
        """How the engine stands now: who runs and waits, the pool, whether it still makes progress."""
        return self._loop.status

    # -- calls --------------------------------------------------------------------------------------------

    def __call__(
        self, prompts: Prompts, gen_config: GenConfigs = None, *, do_preprocess: bool = True
    ) -> Response | list[Response]:
        """Generates, and returns when all is done: a Response for one prompt, a list for a list or several samples.

        With `n` samples of a prompt the list has `n` Responses for it, in order of prompt and sample.

        Args:
            prompts: one prompt or a list.
            gen_config: how to generate; one for all, or one for each.
            do_preprocess: a text becomes the user's message of a chat, where the model has a chat template.

        Raises:
            RequestError, ConfigError: a prompt or a field is invalid; names the prompt's index.
            QueueFullError: the engine would hold more requests than it may (`EngineConfig.max_queue_len`).
            EngineClosedError: the pipeline is closed.
            EngineFailedError: the engine cannot go on; requests that it had have ended with the same error.
        """
        outbox: queue.SimpleQueue[Response] = queue.SimpleQueue()
        requests = self._builder.requests(prompts, gen_config, outbox.put, do_preprocess=do_preprocess, whole=True)
        return in_order(prompts, self._stream(requests, outbox.get))

    def stream_infer(
        self, prompts: Prompts, gen_config: GenConfigs = None, *, do_preprocess: bool = True
    ) -> Generator[Response, None, None]:
        """Yields pieces as they come, of all prompts interleaved; see `__call__`. Closing it cancels the rest."""
        outbox: queue.SimpleQueue[Response] = queue.SimpleQueue()
        requests = self._builder.requests(prompts, gen_config, outbox.put, do_preprocess=do_preprocess)
        return self._stream(requests, outbox.get)

    def _stream(self, requests: Requests, receive: Callable[[], Response]) -> Generator[Response, None, None]:
        call = Call(self._loop, requests)
        try:
            while not call.is_done:
                piece = receive()
                call.hear(piece)
                yield piece
        finally:
            call.cancel()

    def start(
        self,
        prompts: Prompts,
        gen_config: GenConfigs,
        deliver: Callable[[Response], None],
        *,
        do_preprocess: bool = True,
    ) -> Call:
        """Generates, with pieces delivered in the engine's thread, and cancelled from any; see `__call__`.

        `deliver` must not wait; if it raises, its request ends. `Call.hear` is to be told of each piece.
        """
        return Call(self._loop, self._builder.requests(prompts, gen_config, deliver, do_preprocess=do_preprocess))

    async def agenerate(
        self, prompts: Prompts, gen_config: GenConfigs = None, *, do_preprocess: bool = True
    ) -> Response | list[Response]:
        """The async twin of `__call__`."""
        stream = self._astream(prompts, gen_config, do_preprocess, whole=True)
        return in_order(prompts, [response async for response in stream])

    def astream_infer(
        self, prompts: Prompts, gen_config: GenConfigs = None, *, do_preprocess: bool = True
    ) -> AsyncGenerator[Response, None]:
        """The twin of `stream_infer`: what came of an answer since its task last looked is one piece."""
        return self._astream(prompts, gen_config, do_preprocess)

    async def _astream(
        self, prompts: Prompts, gen_config: GenConfigs, do_preprocess: bool, *, whole: bool = False
    ) -> AsyncGenerator[Response, None]:
        postbox = Postbox.here()
        outbox = Outbox(postbox.soon)
        deliver = functools.partial(postbox.post, outbox.put)
        build = functools.partial(
            self._builder.requests, prompts, gen_config, deliver, do_preprocess=do_preprocess, whole=whole
        )
        # Other streams of the event loop go on meanwhile.
        requests = await asyncio.to_thread(build) if takes_long(prompts, gen_config) else build()
        call = Call(self._loop, requests)
        try:
            while not call.is_done:
                for piece in await outbox.take():
                    call.hear(piece)
                    yield piece
        finally:
            call.cancel()

    # -- scores -------------------------------------------------------------------------------------------

    def get_ppl(self, input_ids: Sequence[int] | Sequence[Sequence[int]]) -> list[float]:
        """The mean of -log p(token | those before it) over all tokens but the first of each sequence, as LMDeploy.

        That is the logarithm of the perplexity, in nats.

        Args:
            input_ids: token ids of one sequence, or of several; at least two tokens each.

        Raises:
            InvalidPromptError, PromptTooLongError: a sequence is too short or too long, or is none of token ids.
            RequestError: its numbers are not finite.
        """
        return mean_losses(self, input_ids)

    # -- conversations ------------------------------------------------------------------------------------

    def session(self, gen_config: GenerationConfig | None = None) -> Session:
        """An empty conversation; `gen_config` is for turns that have none of their own."""
        return Session(self, Conversation(self._tokenizer, self._vocab_size, self._eos_ids), gen_config)

    def chat(
        self,
        prompt: Prompt,
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        stream_response: bool = False,
        *,
        do_preprocess: bool = True,
    ) -> Session:
        """One turn of a conversation: the answer is the `response` of the session that comes back.

        Args:
            prompt: the user's text, messages (a system message comes with the first turn), or token ids.
            session: the conversation so far; None begins one.
            gen_config: how to generate; None is the session's own.
            stream_response: the session's `generator` gives the answer in pieces, and the turn ends with it.
            do_preprocess: False takes a text as it is, without the chat template.

        Raises:
            RequestError, ConfigError, QueueFullError: as for a call. The session is as it was.
        """
        session = session or self.session(gen_config)
        session.ask(prompt, gen_config, do_preprocess=do_preprocess)
        if not stream_response:
            session.finish()
        return session

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


def pipeline(model: str | Path | Model | None = None, backend_config: EngineConfig | None = None) -> Pipeline:
    """Loads a model and returns a pipeline on it.

    Of several processes (`EngineConfig.cluster`) the first alone comes back from here. The others run its steps on
    their devices until it closes the pipeline, and end then (SystemExit): all of them call this in the same way.

    Where the process has not set `jax_compilation_cache_dir`, it becomes a folder in the user's cache: compiled steps
    are kept there.

    Args:
        model: a folder, a .gguf file, a Hugging Face repo id, or a model in memory (`turbojax.from_params`); None is
            the embedded default model.
        backend_config: how the engine runs.

    Raises:
        TurbojaxError, CheckpointError: one line that says what is wrong with the model or the config.
    """
    from turbojax.assembly import assemble, assemble_replicas, eos_ids
    from turbojax.distributed.start import together
    from turbojax.hub import resolve_model
    from turbojax.models.model import Model
    from turbojax.tokenizer import load_tokenizer

    config = backend_config or EngineConfig()
    source = model if isinstance(model, Model) else resolve_model(model)
    with together(config) as processes:
        parts = assemble(source, config, processes.lowest)
        pipe = Pipeline(
            processes.runner(parts),
            parts.scheduler,
            load_tokenizer(parts.model.path),
            vocab_size=parts.model.spec.vocab_size,
            eos_ids=eos_ids(parts.model.config, parts.model.generation_config),
            defaults=model_defaults(parts.model.generation_config),
            processors=config.logits_processors,
            memory=parts.memory,
            replicas=[(other.runner, other.scheduler) for other in assemble_replicas(parts, config)],
        )
        processes.report_to(pipe._loop.fail)
    return pipe
