"""How a request generates: GenerationConfig, and where a field that was not given gets its value."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from turbojax.engine.plan import MAX_BIASED_TOKENS, MAX_LOGPROBS
from turbojax.errors import ConfigError
from turbojax.response_format import FORMATS, is_format
from turbojax.rules import as_tuple, check, is_int, is_real

# Seeds are uint32 on the device.
SEED_LIMIT = 1 << 32
# Repetition is looked for in so many newest generated tokens, as in LMDeploy: a long text repeats what is common.
NGRAM_WINDOW_TOKENS = 1024
# What a field has that neither the request nor the model gives: LMDeploy's.
DEFAULTS = {"temperature": 0.8, "top_p": 1.0, "top_k": 50, "min_p": 0.0, "repetition_penalty": 1.0}
LISTS = ("stop_words", "stop_token_ids", "bad_words", "bad_token_ids", "logits_processor_params")
Extent = Literal["all", "generation"]
"""Of which rows: those that generated tokens are sampled from, or those of the prompt as well."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationConfig:
    """How one request generates. Names and meaning follow LMDeploy's; docs/generation.md has them in a table.

    Attributes:
        n: samples of the prompt, each a Response of its own; they differ by their sample index alone.
        max_new_tokens: most tokens to generate; `session_len` may end a sequence earlier. None: as many as that allows.
        min_new_tokens: no end-of-sequence, stop token, stop word or repetition stop before this many tokens.
        do_sample: False is greedy, whatever the sampling fields say.
        temperature: divides the logits; 0 is greedy. None, here and in the next four, is the model's own value
            (generation_config.json) where do_sample is True, else LMDeploy's: 0.8, 1.0, 50, 0.0, 1.0.
        top_p: keep the most likely tokens that together reach this probability; 1 is off.
        top_k: keep this many of the most likely tokens; 0 is off.
        min_p: keep tokens at least this probable relative to the most likely; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens that prompt or output has; 1 is
            off. This one and the two below change greedy answers too.
        presence_penalty: taken off the logits of tokens that the output has.
        frequency_penalty: taken off them for each time that the output has the token.
        logit_bias: what is added to the logits of tokens, by token id.
        bad_token_ids: tokens that never come.
        bad_words: texts that the answer never contains, whatever tokens would spell them.
        logits_processor: name of one of `EngineConfig.logits_processors`.
        logits_processor_params: its parameters, numbers or arrays.
        random_seed: of the request; None draws a fresh one.
        stop_words: texts that end the generation wherever they appear, across token borders too.
        stop_token_ids: tokens that end the generation, beside the model's own end-of-sequence tokens.
        include_stop_str_in_output: leave the stop word, or the text of the stop token, at the end of the text.
        ignore_eos: the model's end-of-sequence tokens do not end the generation.
        skip_special_tokens: leave special tokens out of the text.
        response_format: what the answer must be, in LMDeploy's form ({"type": "json_schema", ...}, "json_object",
            "regex_schema"), or a "choice" or "grammar"; needs the extra `guided`.
        logprobs: log-probabilities of each token come back, with those of so many of the likeliest ones.
        prompt_logprobs: the same of the prompt's tokens.
        output_logits: 'generation': the logits that each token is sampled from come back; 'all': the prompt's too.
        output_last_hidden_state: likewise the last hidden states.
        repetition_ngram_size: with the next field: end once the last so many tokens ...
        repetition_ngram_threshold: ... stand so many times in the generated ones.
        priority: lower ones are served first, of equal ones who came first; a worse one is never passed for ever.
        cache_salt: what is computed for the request is shared only with requests of the same salt, so that nobody can
            tell by the time of an answer what another tenant asked; None is shared among all that have none.
        timeout_s: seconds from the call after which the request ends wherever it stands, with finish reason `timeout`
            and what it has generated until then; None is never.

    Raises:
        ConfigError: a field is out of range or contradicts another.
    """

    n: int = 1
    max_new_tokens: int | None = 512
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logits_processor: str | None = None
    logits_processor_params: tuple[Any, ...] = ()
    random_seed: int | None = None
    stop_words: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    response_format: Mapping[str, Any] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    output_logits: Extent | None = None
    output_last_hidden_state: Extent | None = None
    repetition_ngram_size: int = 0
    repetition_ngram_threshold: int = 0
    priority: int = 0
    cache_salt: str | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for field in LISTS:
            object.__setattr__(self, field, as_tuple("GenerationConfig", field, getattr(self, field)))
        object.__setattr__(self, "logit_bias", bias_pairs(self.logit_bias))
        rules = (
            self._length_rules(), self._sampling_rules(), self._logit_rules(), self._stop_rules(),
            self._output_rules(), self._queue_rules(),
        )  # fmt: skip
        check("GenerationConfig", self, {name: rule for group in rules for name, rule in group.items()})

    def _length_rules(self) -> dict[str, tuple[bool, str]]:
        return {
            "n": (is_int(self.n, 1), "an int >= 1"),
            "max_new_tokens": _optional(self.max_new_tokens, is_int(self.max_new_tokens, 1), "an int >= 1"),
            "min_new_tokens": (
                is_int(self.min_new_tokens, 0, math.inf if self.max_new_tokens is None else self.max_new_tokens),
                f"an int of 0 .. max_new_tokens ({self.max_new_tokens})",
            ),
        }

    def _queue_rules(self) -> dict[str, tuple[bool, str]]:
        return {
            "priority": (is_int(self.priority, -(2**31), 2**31 - 1), "an int of 32 bits; lower ones are served first"),
            "cache_salt": _optional(
                self.cache_salt, isinstance(self.cache_salt, str) and self.cache_salt != "", "a text that is not empty"
            ),
            "timeout_s": _optional(
                self.timeout_s, self.timeout_s != 0 and is_real(self.timeout_s, 0, 1e9), "a number of seconds above 0"
            ),
        }

    def _sampling_rules(self) -> dict[str, tuple[bool, str]]:
        seed = self.random_seed
        return {
            "do_sample": _flag(self.do_sample),
            "temperature": _optional(self.temperature, is_real(self.temperature, 0, 100), "a number of 0 .. 100"),
            "top_p": _optional(
                self.top_p, self.top_p != 0 and is_real(self.top_p, 0, 1), "a number above 0, at most 1"
            ),
            "top_k": _optional(self.top_k, is_int(self.top_k, 0, 2**31 - 1), "an int >= 0 (0 is off)"),
            "min_p": _optional(self.min_p, is_real(self.min_p, 0, 1), "a number of 0 .. 1"),
            "random_seed": _optional(seed, is_int(seed, 0, SEED_LIMIT - 1), f"an int of 0 .. {SEED_LIMIT - 1}"),
        }

    def _logit_rules(self) -> dict[str, tuple[bool, str]]:
        bias, bad = self.bias, self.bad_token_ids
        return {
            "repetition_penalty": _optional(
                self.repetition_penalty,
                is_real(self.repetition_penalty, 0, 100) and self.repetition_penalty != 0,
                "a number above 0, at most 100 (1 is off)",
            ),
            "presence_penalty": (is_real(self.presence_penalty, -2, 2), "a number of -2 .. 2"),
            "frequency_penalty": (is_real(self.frequency_penalty, -2, 2), "a number of -2 .. 2"),
            "logit_bias": (
                all(is_int(token, 0) and is_real(value, -100, 100) for token, value in bias)
                and len({token for token, _ in bias}) == len(bias) <= MAX_BIASED_TOKENS,
                f"numbers of -100 .. 100 by token id, at most {MAX_BIASED_TOKENS}",
            ),
            "bad_token_ids": (
                all(is_int(t, 0) for t in bad)
                and not set(bad) & set(self.stop_token_ids)
                and len(set(bad)) + len(bias) <= MAX_BIASED_TOKENS,
                f"ints >= 0, none of them of stop_token_ids, with logit_bias at most {MAX_BIASED_TOKENS}",
            ),
            "bad_words": (
                all(isinstance(w, str) and w for w in self.bad_words)
                and not any(bad in word for bad in self.bad_words for word in self.stop_words if isinstance(word, str)),
                "texts, none of them empty or part of a stop word, which could then never come",
            ),
            "logits_processor": (self.logits_processor is None or isinstance(self.logits_processor, str), "a name"),
            "logits_processor_params": (
                self.logits_processor is not None or not self.logits_processor_params,
                "() without a logits_processor",
            ),
        }

    def _output_rules(self) -> dict[str, tuple[bool, str]]:
        extents = (None, "all", "generation")
        top = f"None or an int of 0 .. {MAX_LOGPROBS}"
        return {
            "response_format": (self.response_format is None or is_format(self.response_format), f"None, {FORMATS}"),
            "logprobs": (self.logprobs is None or is_int(self.logprobs, 0, MAX_LOGPROBS), top),
            "prompt_logprobs": (self.prompt_logprobs is None or is_int(self.prompt_logprobs, 0, MAX_LOGPROBS), top),
            "output_logits": (self.output_logits in extents, "None, 'all' or 'generation'"),
            "output_last_hidden_state": (self.output_last_hidden_state in extents, "None, 'all' or 'generation'"),
        }

    def _stop_rules(self) -> dict[str, tuple[bool, str]]:
        size, threshold = self.repetition_ngram_size, self.repetition_ngram_threshold
        return {
            "stop_words": (all(isinstance(w, str) and w for w in self.stop_words), "texts, none of them empty"),
            "stop_token_ids": (all(is_int(t, 0) for t in self.stop_token_ids), "ints >= 0"),
            "include_stop_str_in_output": _flag(self.include_stop_str_in_output),
            "ignore_eos": _flag(self.ignore_eos),
            "skip_special_tokens": _flag(self.skip_special_tokens),
            "repetition_ngram_size": (
                is_int(size, 0, NGRAM_WINDOW_TOKENS),
                f"an int of 0 .. {NGRAM_WINDOW_TOKENS} (0 is off)",
            ),
            "repetition_ngram_threshold": (
                is_int(threshold, 2) if size else is_int(threshold, 0, 0),
                "an int >= 2 beside a repetition_ngram_size" if size else "0 without a repetition_ngram_size",
            ),
        }

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0


def bias_pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """Token ids and biases; keys of JSON objects are texts.

    Raises:
        ConfigError: something else.
    """
    pairs = bias.items() if isinstance(bias, Mapping) else bias or ()
    try:
        return tuple((int(token) if isinstance(token, str) else token, value) for token, value in pairs)
    except (TypeError, ValueError) as error:
        raise ConfigError("GenerationConfig", "logit_bias", bias, "numbers by token id") from error


def _flag(value: object) -> tuple[bool, str]:
    return isinstance(value, bool), "True or False"


def _optional(value: object, holds: bool, accepted: str) -> tuple[bool, str]:
    return value is None or holds, f"None or {accepted}"


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling values that a model's generation_config.json recommends.

    One that is out of range is left out with a warning: the model can be used without it.
    """
    found = {}
    for name in DEFAULTS:
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            found[name] = getattr(GenerationConfig(**{name: value}), name)
        except ConfigError as error:
            log.warning("generation_config.json: %s; it is not used", error)
    return found


def with_defaults(config: GenerationConfig, model: Mapping[str, Any]) -> GenerationConfig:
    """The config with every field filled in: a sampled request takes what it leaves open from the model.

    A greedy one does not: it is the argmax of the model's logits unless the request itself says otherwise.
    """
    known = DEFAULTS if config.is_greedy else DEFAULTS | dict(model)
    missing: dict[str, Any] = {name: value for name, value in known.items() if getattr(config, name) is None}
    return dataclasses.replace(config, **missing) if missing else config
