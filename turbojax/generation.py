"""How a request generates: GenerationConfig, and where a field that was not given gets its value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turbojax.errors import ConfigError, ModelConfigError
from turbojax.rules import as_tuple, check, is_int, is_real

# Seeds are uint32 on the device.
SEED_LIMIT = 1 << 32
# Repetition is looked for in so many newest generated tokens, as in LMDeploy: a long text repeats what is common.
NGRAM_WINDOW_TOKENS = 1024
# What a field has that neither the request nor the model gives: LMDeploy's.
DEFAULTS = {"temperature": 0.8, "top_p": 1.0, "top_k": 50, "min_p": 0.0}


@dataclass(frozen=True)
class GenerationConfig:
    """How one request generates. Names and meaning follow LMDeploy's; docs/generation.md has them in a table.

    Attributes:
        n: samples of the prompt, each a Response of its own; they differ by their sample index alone.
        max_new_tokens: most tokens to generate; `session_len` may end a sequence earlier.
        min_new_tokens: no end-of-sequence, stop token, stop word or repetition stop before this many tokens.
        do_sample: False is greedy, whatever the sampling fields say.
        temperature: divides the logits; 0 is greedy. None, here and in the next three, is the model's own value
            (generation_config.json), else LMDeploy's: 0.8, 1.0, 50, 0.0.
        top_p: keep the most likely tokens that together reach this probability; 1 is off.
        top_k: keep this many of the most likely tokens; 0 is off.
        min_p: keep tokens at least this probable relative to the most likely; 0 is off.
        random_seed: of the request; None draws a fresh one.
        stop_words: texts that end the generation wherever they appear, across token borders too.
        stop_token_ids: tokens that end the generation, beside the model's own end-of-sequence tokens.
        include_stop_str_in_output: leave the stop word, or the text of the stop token, at the end of the text.
        ignore_eos: the model's end-of-sequence tokens do not end the generation.
        skip_special_tokens: leave special tokens out of the text.
        repetition_ngram_size: with the next field: end once the last so many tokens ...
        repetition_ngram_threshold: ... stand so many times in the generated ones.
        priority: lower ones are served first, of equal ones who came first; a worse one is never passed for ever.
        timeout_s: seconds from the call after which the request ends wherever it stands, with finish reason `timeout`
            and what it has generated until then; None is never.

    Raises:
        ConfigError: a field is out of range or contradicts another.
    """

    n: int = 1
    max_new_tokens: int = 512
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    random_seed: int | None = None
    stop_words: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    repetition_ngram_size: int = 0
    repetition_ngram_threshold: int = 0
    priority: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for field in ("stop_words", "stop_token_ids"):
            object.__setattr__(self, field, as_tuple("GenerationConfig", field, getattr(self, field)))
        rules = (self._length_rules(), self._sampling_rules(), self._stop_rules(), self._queue_rules())
        check("GenerationConfig", self, {name: rule for group in rules for name, rule in group.items()})

    def _length_rules(self) -> dict[str, tuple[bool, str]]:
        return {
            "n": (is_int(self.n, 1), "an int >= 1"),
            "max_new_tokens": (is_int(self.max_new_tokens, 1), "an int >= 1"),
            "min_new_tokens": (
                is_int(self.min_new_tokens, 0) and self.min_new_tokens <= self.max_new_tokens,
                f"an int of 0 .. max_new_tokens ({self.max_new_tokens})",
            ),
        }

    def _queue_rules(self) -> dict[str, tuple[bool, str]]:
        return {
            "priority": (is_int(self.priority, -(2**31), 2**31 - 1), "an int of 32 bits; lower ones are served first"),
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
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0


def _flag(value: object) -> tuple[bool, str]:
    return isinstance(value, bool), "True or False"


def _optional(value: object, holds: bool, accepted: str) -> tuple[bool, str]:
    return value is None or holds, f"None or {accepted}"


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling values that a model's generation_config.json recommends.

    Raises:
        ModelConfigError: one of them is out of range.
    """
    given = {name: generation_config[name] for name in DEFAULTS if generation_config.get(name) is not None}
    try:
        GenerationConfig(**given)
    except ConfigError as error:
        raise ModelConfigError(f"generation_config.json: {error}") from error
    return given


def with_defaults(config: GenerationConfig, model: Mapping[str, Any]) -> GenerationConfig:
    """The config with every field filled in: a sampled request takes what it leaves open from the model.

    A greedy one does not: it is the argmax of the model's logits unless the request itself says otherwise.
    """
    known = DEFAULTS if config.is_greedy else DEFAULTS | dict(model)
    missing: dict[str, Any] = {name: value for name, value in known.items() if getattr(config, name) is None}
    return dataclasses.replace(config, **missing) if missing else config
