"""From prompts and configs to requests: everything is checked here, before anything is queued."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turbojax.configs import MAX_STOP_IDS
from turbojax.engine.plan import SamplingParams
from turbojax.engine.request import Request
from turbojax.engine.response import Response
from turbojax.engine.stopping import StopRules
from turbojax.engine.text import Decode, TextSink
from turbojax.errors import ConfigError
from turbojax.generation import DEFAULTS, GenerationConfig, with_defaults
from turbojax.prompts import Prompt, as_list, encode

if TYPE_CHECKING:
    import numpy as np

    from turbojax.engine.scheduler import Scheduler
    from turbojax.tokenizer import Tokenizer

Prompts = Prompt | Sequence[Prompt]
GenConfigs = GenerationConfig | Sequence[GenerationConfig] | None
Deliver = Callable[[Response], None]


class RequestBuilder:
    """Makes the requests of one engine. Any thread may call it.

    A config's `None` fields are the model's own (`defaults`), see `with_defaults`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        defaults: Mapping[str, Any],
    ) -> None:
        self._scheduler, self._tokenizer, self._defaults = scheduler, tokenizer, defaults
        self._vocab_size, self._eos_ids = vocab_size, tuple(eos_ids)
        self._request_ids = itertools.count()

    def requests(
        self, prompts: Prompts, gen_config: GenConfigs, deliver: Deliver, *, do_preprocess: bool, whole: bool = False
    ) -> dict[tuple[int, int], Request]:
        """A request for every sample of every prompt, by (index, sample_index); `whole` ones deliver one piece.

        Raises:
            RequestError, ConfigError: a prompt or a field is invalid; names the prompt's index.
        """
        many = as_list(prompts)
        configs = one_for_each(gen_config, len(many))
        requests = {}
        for index, (prompt, config) in enumerate(zip(many, configs, strict=True)):
            name = "the prompt" if len(many) == 1 else f"prompt {index}"
            ids = encode(prompt, self._tokenizer, self._vocab_size, name, do_preprocess=do_preprocess)
            self._scheduler.check(len(ids), name)
            config = with_defaults(config, self._defaults)
            stop_ids = self._checked_stop_ids(config)
            sampling = sampling_of(config)
            for sample_index in range(config.n):
                sink = self._sink(deliver, config, stop_ids, len(ids), index, sample_index, whole)
                one = dataclasses.replace(sampling, sample_index=sample_index)
                requests[index, sample_index] = self._request(ids, config, one, stop_ids, sink)
        return requests

    def _request(
        self, ids: np.ndarray, config: GenerationConfig, sampling: SamplingParams, stop_ids: tuple[int, ...],
        sink: TextSink,
    ) -> Request:  # fmt: skip
        return Request(
            request_id=next(self._request_ids),
            prompt_ids=ids,
            sampling=sampling,
            stop_token_ids=stop_ids,
            max_len=len(ids) + config.max_new_tokens,
            min_len=len(ids) + config.min_new_tokens,
            priority=config.priority,
            deadline_s=None if config.timeout_s is None else time.monotonic() + config.timeout_s,
            sink=sink,
        )

    def _checked_stop_ids(self, config: GenerationConfig) -> tuple[int, ...]:
        """The tokens that end the request, once what depends on the engine is known to be in range."""
        num_slots = self._scheduler.config.num_slots
        if config.n > num_slots:
            raise ConfigError("GenerationConfig", "n", config.n, f"an int of 1 .. max_batch_size ({num_slots})")
        if config.n > 1 and config.is_greedy:
            accepted = "1 where decoding is greedy (do_sample=False or temperature=0): all samples would be the same"
            raise ConfigError("GenerationConfig", "n", config.n, accepted)
        if any(token >= self._vocab_size for token in config.stop_token_ids):
            accepted = f"token ids below the vocabulary size ({self._vocab_size})"
            raise ConfigError("GenerationConfig", "stop_token_ids", config.stop_token_ids, accepted)
        stop_ids = (*(() if config.ignore_eos else self._eos_ids), *config.stop_token_ids)
        stop_ids = tuple(dict.fromkeys(stop_ids))
        if len(stop_ids) > MAX_STOP_IDS:
            accepted = f"at most {MAX_STOP_IDS} together with the model's {len(self._eos_ids)} end-of-sequence tokens"
            raise ConfigError("GenerationConfig", "stop_token_ids", config.stop_token_ids, accepted)
        return stop_ids

    def _sink(
        self, deliver: Deliver, config: GenerationConfig, stop_ids: tuple[int, ...],
        num_input_tokens: int, index: int, sample_index: int, whole: bool,
    ) -> TextSink:  # fmt: skip
        rules = StopRules(
            words=config.stop_words,
            token_ids=frozenset(stop_ids),
            min_new_tokens=config.min_new_tokens,
            ngram_size=config.repetition_ngram_size,
            ngram_threshold=config.repetition_ngram_threshold,
            shows_stop=config.include_stop_str_in_output,
        )
        return TextSink(
            deliver,
            self._decoder(config.skip_special_tokens),
            rules,
            decode_stop=self._decoder(False),
            num_input_tokens=num_input_tokens,
            index=index,
            sample_index=sample_index,
            whole=whole,
        )

    def _decoder(self, skip_special_tokens: bool) -> Decode | None:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


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
    config = with_defaults(config, {})
    values: dict[str, Any] = {name: getattr(config, name) for name in DEFAULTS}
    return SamplingParams(**values, seed=secrets.randbits(32) if config.random_seed is None else config.random_seed)
