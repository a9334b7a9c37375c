"""What users set: how the engine runs (EngineConfig) and how a request generates (GenerationConfig)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from turbojax.errors import ConfigError

KV_BITS = (16, 8, 4)
_BITS_OF_QUANT_POLICY = {0: 16, 8: 8, 4: 4}
DTYPES = ("auto", "bfloat16", "float16", "float32")
# Seeds are uint32 on the device.
SEED_LIMIT = 1 << 32
# Stop tokens that a slot holds on the device, the model's own included.
MAX_STOP_IDS = 16


def is_int(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """An integer of low .. high; bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_real(value: Any, low: float, high: float) -> bool:
    """A finite number of low .. high; bool is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and low <= value <= high


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs. Names follow LMDeploy's.

    Attributes:
        dtype: of activations and of weights that are not quantised; "auto" follows checkpoint and device.
        session_len: most tokens of one sequence, prompt and generated together; None is the model's own limit.
        max_batch_size: sequences that run at once; None is 256 on a GPU and 64 elsewhere.
        cache_max_entry_count: size of the KV pool: a float is the share of the memory that weights and the steps'
            workspace leave free, an int the number of pages, the sink page included.
        cache_block_seq_len: tokens of a page.
        quant_policy: bits of the KV cache: 0 (as the activations), 8 or 4.
        k_bits: bits of K (16, 8, 4) where it differs from quant_policy.
        v_bits: bits of V (16, 8, 4) where it differs from quant_policy.
        kv_policy: (bits of K, bits of V) of every layer; excludes the three fields above.
        max_prefill_token_num: most prompt tokens that one step computes; longer prompts go in chunks. None is 8192 on
            a GPU and 2048 elsewhere.
        num_decode_steps: tokens of each sequence per call to the device while no request waits.
        compile_ahead: compile every step before the first request instead of when it is met; None does on a GPU,
            where a process that runs many requests should not stop to compile, and not elsewhere.
        debug: an error of numerics names the first layer whose output is not finite, and page numbers are checked
            before each step.

    Raises:
        ConfigError: a field is out of range or contradicts another.
    """

    dtype: str = "auto"
    session_len: int | None = None
    max_batch_size: int | None = None
    cache_max_entry_count: float | int = 0.8
    cache_block_seq_len: int = 64
    quant_policy: int = 0
    k_bits: int | None = None
    v_bits: int | None = None
    kv_policy: tuple[tuple[int, int], ...] | None = None
    max_prefill_token_num: int | None = None
    num_decode_steps: int = 4
    compile_ahead: bool | None = False
    debug: bool = False

    def __post_init__(self) -> None:
        if self.kv_policy is not None:
            object.__setattr__(self, "kv_policy", _layer_bits(self.kv_policy))
        share, page_len = self.cache_max_entry_count, self.cache_block_seq_len
        rules = {
            "dtype": (self.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
            "session_len": (self.session_len is None or is_int(self.session_len, 2), "None or an int >= 2"),
            "max_batch_size": (self.max_batch_size is None or is_int(self.max_batch_size, 1), "None or an int >= 1"),
            "cache_max_entry_count": (
                is_int(share, 2) or (isinstance(share, float) and 0 < share < 1),
                "a float between 0 and 1 (share of the free memory) or an int >= 2 (pages)",
            ),
            "cache_block_seq_len": (is_int(page_len, 1) and page_len & (page_len - 1) == 0, "a power of two"),
            "quant_policy": (is_int(self.quant_policy) and self.quant_policy in _BITS_OF_QUANT_POLICY, "0, 4 or 8"),
            "k_bits": (self.k_bits is None or (is_int(self.k_bits) and self.k_bits in KV_BITS), "None, 16, 8 or 4"),
            "v_bits": (self.v_bits is None or (is_int(self.v_bits) and self.v_bits in KV_BITS), "None, 16, 8 or 4"),
            "max_prefill_token_num": (
                self.max_prefill_token_num is None
                or is_int(self.max_prefill_token_num, page_len if is_int(page_len) else 1),
                f"None or an int >= cache_block_seq_len ({page_len}): chunks end at page edges",
            ),
            "num_decode_steps": (
                is_int(self.num_decode_steps, 1, page_len if is_int(page_len) else 1),
                f"an int of 1 .. cache_block_seq_len ({page_len}): a call may enter one new page",
            ),
            "compile_ahead": (isinstance(self.compile_ahead, bool | None), "True, False or None"),
            "debug": (isinstance(self.debug, bool), "True or False"),
        }
        _check("EngineConfig", self, rules)
        if self.kv_policy is not None and (self.quant_policy or self.k_bits or self.v_bits):
            accepted = "None beside quant_policy, k_bits or v_bits: it already says the bits of every layer"
            raise ConfigError("EngineConfig", "kv_policy", self.kv_policy, accepted)

    def kv_bits(self, layer: int) -> tuple[int, int]:
        """Bits of K and of V in a layer.

        Raises:
            ConfigError: kv_policy ends before this layer.
        """
        if self.kv_policy is None:
            bits = _BITS_OF_QUANT_POLICY[self.quant_policy]
            return self.k_bits or bits, self.v_bits or bits
        if layer >= len(self.kv_policy):
            raise ConfigError("EngineConfig", "kv_policy", self.kv_policy, f"an entry for layer {layer} as well")
        return self.kv_policy[layer]


@dataclass(frozen=True)
class GenerationConfig:
    """How one request generates. Names and meaning follow LMDeploy's.

    Attributes:
        max_new_tokens: most tokens to generate; `session_len` may end a sequence earlier.
        min_new_tokens: no end-of-sequence, stop token or stop word before this many tokens.
        do_sample: False is greedy, whatever the sampling fields say.
        temperature: divides the logits; 0 is greedy.
        top_p: keep the most likely tokens that together reach this probability; 1 is off.
        top_k: keep this many of the most likely tokens; 0 is off.
        min_p: keep tokens at least this probable relative to the most likely; 0 is off.
        random_seed: of the request; None draws a fresh one.
        stop_words: texts that end the generation wherever they appear, across token borders too; cut from
            the text.
        stop_token_ids: tokens that end the generation, beside the model's own end-of-sequence tokens.
        ignore_eos: the model's end-of-sequence tokens do not end the generation.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ConfigError: a field is out of range or contradicts another.
    """

    max_new_tokens: int = 512
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int = 50
    min_p: float = 0.0
    random_seed: int | None = None
    stop_words: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for field in ("stop_words", "stop_token_ids"):
            object.__setattr__(self, field, _as_tuple(field, getattr(self, field)))
        seed = self.random_seed
        flags = {name: (isinstance(getattr(self, name), bool), "True or False")
                 for name in ("do_sample", "ignore_eos", "skip_special_tokens")}  # fmt: skip
        rules = {
            "max_new_tokens": (is_int(self.max_new_tokens, 1), "an int >= 1"),
            "min_new_tokens": (
                is_int(self.min_new_tokens, 0) and self.min_new_tokens <= self.max_new_tokens,
                f"an int of 0 .. max_new_tokens ({self.max_new_tokens})",
            ),
            "temperature": (is_real(self.temperature, 0, 100), "a number of 0 .. 100"),
            "top_p": (is_real(self.top_p, 0, 1) and self.top_p > 0, "a number above 0, at most 1"),
            "top_k": (is_int(self.top_k, 0, 2**31 - 1), "an int >= 0 (0 is off)"),
            "min_p": (is_real(self.min_p, 0, 1), "a number of 0 .. 1"),
            "random_seed": (
                seed is None or is_int(seed, 0, SEED_LIMIT - 1),
                f"None or an int of 0 .. {SEED_LIMIT - 1}",
            ),
            "stop_words": (all(isinstance(w, str) and w for w in self.stop_words), "texts, none of them empty"),
            "stop_token_ids": (all(is_int(t, 0) for t in self.stop_token_ids), "ints >= 0"),
        }
        _check("GenerationConfig", self, rules | flags)

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0


def _check(owner: str, config: object, rules: dict[str, tuple[bool, str]]) -> None:
    for field, (holds, accepted) in rules.items():
        if not holds:
            raise ConfigError(owner, field, getattr(config, field), accepted)


def _as_tuple(field: str, value: Any) -> tuple[Any, ...]:
    """A list or the like as a tuple, None as none; a bare text would fall apart into its letters."""
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError("GenerationConfig", field, value, "a list or tuple")
    return tuple(value)


def _layer_bits(policy: Any) -> tuple[tuple[int, int], ...]:
    accepted = "a (bits of K, bits of V) pair of 16, 8 or 4 for every layer"
    if not isinstance(policy, list | tuple) or not policy:
        raise ConfigError("EngineConfig", "kv_policy", policy, accepted)
    for pair in policy:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or any(bits not in KV_BITS for bits in pair):
            raise ConfigError("EngineConfig", "kv_policy", policy, accepted)
    return tuple((k, v) for k, v in policy)
