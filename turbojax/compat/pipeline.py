"""LMDeploy's `pipeline`: its calls, its configs, its responses."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from turbojax import configs
from turbojax.compat.messages import GenerationConfig, Response, TurbomindEngineConfig
from turbojax.compat.tokenizer import Tokenizer
from turbojax.errors import ConfigError, MissingTokenizerError

if TYPE_CHECKING:
    from turbojax import api
    from turbojax.request_builder import Prompts
    from turbojax.session import Session

LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")
GenConfigs = GenerationConfig | Sequence[GenerationConfig] | None


class Pipeline:
    """Generates for prompts; a `turbojax.Pipeline` by other names. Close it, or use it as a context."""

    def __init__(self, pipe: api.Pipeline) -> None:
        self.pipe = pipe

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back.

        Raises:
            MissingTokenizerError: the model has none.
        """
        if self.pipe.tokenizer is None:
            raise MissingTokenizerError("the model has no tokenizer; give token ids")
        return Tokenizer(self.pipe.tokenizer)

    @property
    def session_len(self) -> int:
        """Most tokens of a sequence, prompt and generated."""
        return self.pipe.session_len

    def __call__(
        self, prompts: Prompts, gen_config: GenConfigs = None, *, do_preprocess: bool = True
    ) -> Response | list[Response]:
        """A Response for one prompt, a list for several; see `turbojax.Pipeline`."""
        found = self.pipe(prompts, mapped(gen_config, streams=False), do_preprocess=do_preprocess)
        return [Response.of(one) for one in found] if isinstance(found, list) else Response.of(found)

    infer = batch_infer = __call__

    def stream_infer(
        self, prompts: Prompts, gen_config: GenConfigs = None, *, do_preprocess: bool = True
    ) -> Generator[Response, None, None]:
        """Pieces as they come, of all prompts interleaved. Closing it cancels the rest."""
        pieces = self.pipe.stream_infer(prompts, mapped(gen_config, streams=True), do_preprocess=do_preprocess)
        return self._stream(pieces)

    @staticmethod
    def _stream(pieces: Generator) -> Generator[Response, None, None]:
        try:
            for piece in pieces:
                yield Response.of(piece)
        finally:
            pieces.close()

    def session(self) -> Session:
        """An empty conversation."""
        return self.pipe.session()

    def chat(
        self,
        prompt: Prompts,
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        stream_response: bool = False,
    ) -> Session | Iterator[Response]:
        """One turn of a conversation: the session, or with `stream_response` the pieces of the answer."""
        config = (gen_config or GenerationConfig()).to_turbojax(samples=False)
        session = self.pipe.chat(prompt, session, config, stream_response)  # type: ignore[arg-type]
        if not stream_response:
            return session
        assert session.generator is not None
        return self._stream(session.generator)

    def get_ppl(self, input_ids: Sequence[int] | Sequence[Sequence[int]]) -> list[float]:
        """The mean loss of each sequence of token ids, in nats."""
        return self.pipe.get_ppl(input_ids)

    def close(self) -> None:
        """Ends what runs and stops the engine."""
        self.pipe.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def mapped(gen_config: GenConfigs, *, streams: bool) -> configs.GenerationConfig | list[configs.GenerationConfig]:
    """LMDeploy's configs for turbojax.

    Raises:
        ConfigError: one asks for a stream where the call gives none, or the other way round.
    """
    if gen_config is None or isinstance(gen_config, GenerationConfig):
        config = gen_config or GenerationConfig()
        if config.stream is not None and config.stream != streams:
            accepted = f"None or {streams} here: stream_infer gives pieces, a call gives whole answers"
            raise ConfigError("GenerationConfig", "stream", config.stream, accepted)
        return config.to_turbojax(samples=False)
    return [mapped(config, streams=streams) for config in gen_config]  # type: ignore[misc]


def pipeline(
    model_path: str | Path | None = None,
    backend_config: TurbomindEngineConfig | None = None,
    *,
    log_level: str = "WARNING",
) -> Pipeline:
    """Loads a model; see `turbojax.pipeline`.

    Args:
        model_path: a folder, a .gguf file or a Hugging Face repo id; None is the embedded default model.
        backend_config: how the engine runs.
        log_level: of turbojax's own log.

    Raises:
        TurbojaxError, CheckpointError: one line that says what is wrong with the model or the config.
    """
    from turbojax import api

    if log_level not in LEVELS:
        raise ConfigError("pipeline", "log_level", log_level, ", ".join(LEVELS))
    logging.getLogger("turbojax").setLevel(log_level)
    config = backend_config or TurbomindEngineConfig()
    return Pipeline(api.pipeline(model_path, config.to_turbojax()))
