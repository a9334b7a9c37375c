"""From prompts and configs to requests: everything is checked here, before anything is queued."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from turbojax.configs import MAX_STOP_IDS
from turbojax.engine.plan import SamplingParams
from turbojax.engine.request import Request
from turbojax.engine.response import Response
from turbojax.engine.stopping import StopRules
from turbojax.engine.text import Decode, TextSink
from turbojax.engine.wants import Wants
from turbojax.errors import ConfigError, MissingTokenizerError
from turbojax.generation import GenerationConfig, with_defaults
from turbojax.guide_maker import GuideMaker
from turbojax.prompts import Prompt, as_list, encode
from turbojax.rules import check

if TYPE_CHECKING:
    from turbojax.engine.scheduler import Scheduler
    from turbojax.processors import LogitsProcessor
    from turbojax.tokenizer import Tokenizer

Prompts = Prompt | Sequence[Prompt]
GenConfigs = GenerationConfig | Sequence[GenerationConfig] | None
Deliver = Callable[[Response], None]

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


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
        processors: Mapping[str, LogitsProcessor],
    ) -> None:
        self._scheduler, self._tokenizer, self._defaults = scheduler, tokenizer, defaults
        self._vocab_size, self._eos_ids, self._processors = vocab_size, tuple(eos_ids), processors
        self._guides = GuideMaker(tokenizer, vocab_size, self._eos_ids)
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
            self._check(config)
            sampling = sampling_of(config)
            for sample_index in range(config.n):
                sink = self._sink(deliver, config, ids, index, sample_index, whole)
                one = dataclasses.replace(sampling, sample_index=sample_index)
                requests[index, sample_index] = self._request(ids, config, one, sink)
        return requests

    def _request(self, ids: np.ndarray, config: GenerationConfig, sampling: SamplingParams, sink: TextSink) -> Request:
        wants = wants_of(config)
        return Request(
            request_id=next(self._request_ids),
            prompt_ids=ids,
            sampling=sampling,
            stop_token_ids=self._stop_ids(config),
            max_len=self._scheduler.max_len if config.max_new_tokens is None else len(ids) + config.max_new_tokens,
            min_len=len(ids) + config.min_new_tokens,
            wants=wants,
            guide=self._guides.guide(config),
            priority=config.priority,
            cache_salt=config.cache_salt,
            reads_cache=not wants.of_prompt,
            deadline_s=None if config.timeout_s is None else time.monotonic() + config.timeout_s,
            sink=sink,
        )

    def _stop_ids(self, config: GenerationConfig) -> tuple[int, ...]:
        """The tokens that end the request, each once."""
        return tuple(dict.fromkeys((*(() if config.ignore_eos else self._eos_ids), *config.stop_token_ids)))

    def _check(self, config: GenerationConfig) -> None:
        """What depends on the engine.

        Raises:
            ConfigError: a field asks for what it does not have.
            MissingTokenizerError: stop words without a tokenizer, which nobody could find.
        """
        num_slots, ids = self._scheduler.config.num_slots, f"token ids below the vocabulary size ({self._vocab_size})"
        if config.stop_words and self._tokenizer is None:
            raise MissingTokenizerError("stop_words: the model has no tokenizer; give stop_token_ids")
        rules = {
            "n": (
                config.n <= (1 if config.is_greedy else num_slots),
                "1 where decoding is greedy (do_sample=False or temperature=0), since all samples would be the same"
                if config.is_greedy
                else f"an int of 1 .. max_batch_size ({num_slots})",
            ),
            "stop_token_ids": (max(config.stop_token_ids, default=0) < self._vocab_size, ids),
            "bad_token_ids": (max(config.bad_token_ids, default=0) < self._vocab_size, ids),
            "logit_bias": (max([token for token, _ in config.bias], default=0) < self._vocab_size, ids),
        }
        check("GenerationConfig", config, rules)
        if len(self._stop_ids(config)) > MAX_STOP_IDS:
            accepted = f"at most {MAX_STOP_IDS} together with the model's {len(self._eos_ids)} end-of-sequence tokens"
            raise ConfigError("GenerationConfig", "stop_token_ids", config.stop_token_ids, accepted)
        self._check_processor(config)

    def _check_processor(self, config: GenerationConfig) -> None:
        name = config.logits_processor
        if name is None:
            return
        if name not in self._processors:
            accepted = f"a name of EngineConfig.logits_processors ({', '.join(sorted(self._processors)) or 'none'})"
            raise ConfigError("GenerationConfig", "logits_processor", name, accepted)
        shapes = self._processors[name].param_shapes
        try:
            params = [np.asarray(param, np.float32) for param in config.logits_processor_params]
            fits = tuple(param.shape for param in params) == shapes and all(np.isfinite(p).all() for p in params)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            accepted = f"finite numbers in arrays of the shapes {list(shapes)}"
            raise ConfigError("GenerationConfig", "logits_processor_params", config.logits_processor_params, accepted)

    def _sink(
        self, deliver: Deliver, config: GenerationConfig, ids: np.ndarray, index: int, sample_index: int, whole: bool
    ) -> TextSink:
        rules = StopRules(
            words=config.stop_words,
            token_ids=frozenset(self._stop_ids(config)),
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
            prompt_ids=ids,
            index=index,
            sample_index=sample_index,
            whole=whole,
            wants_prompt_logprobs=config.prompt_logprobs is not None,
        )

    def _decoder(self, skip_special_tokens: bool) -> Decode | None:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        return functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)


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
    config = with_defaults(config, {})
    values: dict[str, Any] = {name: getattr(config, name) for name in PENALTIES}
    if not config.is_greedy:
        values |= {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        values["seed"] = secrets.randbits(32) if config.random_seed is None else config.random_seed
    bad = dict.fromkeys(config.bad_token_ids)
    return SamplingParams(
        **values,
        logit_bias=tuple((token, bias) for token, bias in config.bias if token not in bad),
        bad_token_ids=tuple(bad),
        processor=config.logits_processor,
        processor_params=config.logits_processor_params,
    )


def wants_of(config: GenerationConfig) -> Wants:
    """What a config asks for beside text."""
    return Wants(config.logprobs, config.prompt_logprobs, config.output_logits, config.output_last_hidden_state)


def takes_long(prompts: Prompts, gen_config: GenConfigs) -> bool:
    """Whether requests of these are no matter of microseconds: texts to read, a format to compile, words to look up."""
    configs = [gen_config] if isinstance(gen_config, GenerationConfig) else gen_config or ()
    if any(config.response_format is not None or config.bad_words for config in configs):
        return True
    first: Any = prompts
    while isinstance(first, Sequence) and not isinstance(first, str) and first:
        first = first[0]
    return isinstance(first, str | Mapping)
