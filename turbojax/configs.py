"""What users set: how the engine runs (EngineConfig) and how a request generates (GenerationConfig)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoints.model_format import MODEL_FORMATS
from turbojax.distributed.places import ClusterConfig
from turbojax.errors import ConfigError
from turbojax.generation import GenerationConfig
from turbojax.processors import LogitsProcessor
from turbojax.rules import check, is_int

__all__ = ["ClusterConfig", "EngineConfig", "GenerationConfig", "LogitsProcessor"]

KV_BITS = (16, 8, 4)
_BITS_OF_QUANT_POLICY = {0: 16, 8: 8, 4: 4}
DTYPES = ("auto", "bfloat16", "float16", "float32")
# Stop tokens that a slot holds on the device, the model's own included.
MAX_STOP_IDS = 16


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs. Names follow LMDeploy's.

    Attributes:
        dtype: of activations and of weights that are not quantised; "auto" follows checkpoint and device.
        model_format: what the checkpoint is: "hf" (not quantised), "awq", "gptq", "compressed-tensors", "fp8",
            "smooth_quant", "mxfp4" or "gguf". None finds out; another than the checkpoint's is refused.
        session_len: most tokens of one sequence, prompt and generated together; None is the model's own limit.
        max_batch_size: sequences that run at once; None is 256 on a GPU and 64 elsewhere.
        cache_max_entry_count: size of the KV pool: a float is the share of the memory that weights and the steps'
            workspace leave free, an int the number of pages, the sink page included.
        cache_block_seq_len: tokens of a page.
        quant_policy: bits of the KV cache: 0 (as the activations), 8 or 4. None beside no other field of the KV cache's
            bits is the checkpoint's own policy, which `turbojax lite audit --budget` writes; without one it is 0.
        k_bits: bits of K (16, 8, 4) where it differs from quant_policy.
        v_bits: bits of V (16, 8, 4) where it differs from quant_policy.
        kv_policy: (bits of K, bits of V) of every layer; excludes the three fields above.
        kv_hadamard: multiply queries and keys by a Hadamard matrix in the layers whose K has 4 bits: attention is the
            same, and K loses less than half as much. None is as the checkpoint's own policy says, else False.
        max_prefill_token_num: most prompt tokens that one step computes; longer prompts go in chunks. Sequences that
            decode in that step take theirs from it, up to a half, and behind a long history chunks beside them are
            smaller. None is 8192 on a GPU and 2048 elsewhere.
        max_queue_len: most requests that the engine holds beyond those that run at once; more are refused with
            QueueFullError. None is any number.
        enable_prefix_caching: keep the pages of what was computed, prompts and generated tokens, for requests that
            begin the same, until the pool needs them.
        num_decode_steps: tokens of each sequence per call to the device while no request waits.
        batch_invariant: what a request gives, greedy or seeded, is bit by bit the same whatever else runs, however its
            prompt is cut, cached or recomputed, on one device and version. All rows run through one program, a tile of
            them a call, one token a call: small steps take several times as long (docs/engine_gpu.md has figures).
        compile_ahead: compile every step before the first request instead of when it is met; None does on a GPU,
            where a process that runs many requests should not stop to compile, and not elsewhere.
        logits_processors: what requests can name as their processor of logits, by name; compiled into the steps.
        debug: an error of numerics names the first layer whose output is not finite, and page numbers are checked
            before each step.
        tp: devices that the model is cut between; they run every step together.
        dp: engines side by side, of `tp` devices each, with weights, KV pool, `max_batch_size` and `max_queue_len` of
            their own; a request runs where the beginning of its prompt was run before, or where the fewest are.
        cluster: several processes that run this engine together, each with devices of its own; `tp` counts them all.

    Raises:
        ConfigError: a field is out of range or contradicts another.
    """

    dtype: str = "auto"
    model_format: str | None = None
    session_len: int | None = None
    max_batch_size: int | None = None
    cache_max_entry_count: float | int = 0.8
    cache_block_seq_len: int = 64
    quant_policy: int | None = None
    k_bits: int | None = None
    v_bits: int | None = None
    kv_policy: tuple[tuple[int, int], ...] | None = None
    kv_hadamard: bool | None = None
    max_prefill_token_num: int | None = None
    max_queue_len: int | None = None
    enable_prefix_caching: bool = True
    num_decode_steps: int = 4
    batch_invariant: bool = False
    compile_ahead: bool | None = False
    logits_processors: Mapping[str, LogitsProcessor] = field(default_factory=dict)
    debug: bool = False
    tp: int = 1
    dp: int = 1
    cluster: ClusterConfig | None = None

    def __post_init__(self) -> None:
        if self.kv_policy is not None:
            object.__setattr__(self, "kv_policy", _layer_bits(self.kv_policy))
        share, page_len = self.cache_max_entry_count, self.cache_block_seq_len
        rules = {
            "dtype": (self.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
            "model_format": (self.model_format in (None, *MODEL_FORMATS), f"None or {', '.join(MODEL_FORMATS)}"),
            "session_len": (self.session_len is None or is_int(self.session_len, 2), "None or an int >= 2"),
            "max_batch_size": (self.max_batch_size is None or is_int(self.max_batch_size, 1), "None or an int >= 1"),
            "cache_max_entry_count": (
                is_int(share, 2) or (isinstance(share, float) and 0 < share < 1),
                "a float between 0 and 1 (share of the free memory) or an int >= 2 (pages)",
            ),
            "cache_block_seq_len": (is_int(page_len, 1) and page_len & (page_len - 1) == 0, "a power of two"),
            "quant_policy": (
                self.quant_policy is None or (is_int(self.quant_policy) and self.quant_policy in _BITS_OF_QUANT_POLICY),
                "None, 0, 4 or 8",
            ),
            "k_bits": (self.k_bits is None or (is_int(self.k_bits) and self.k_bits in KV_BITS), "None, 16, 8 or 4"),
            "v_bits": (self.v_bits is None or (is_int(self.v_bits) and self.v_bits in KV_BITS), "None, 16, 8 or 4"),
            "max_prefill_token_num": (
                self.max_prefill_token_num is None
                or is_int(self.max_prefill_token_num, page_len if is_int(page_len) else 1),
                f"None or an int >= cache_block_seq_len ({page_len}): chunks end at page edges",
            ),
            "max_queue_len": (self.max_queue_len is None or is_int(self.max_queue_len, 0), "None or an int >= 0"),
            "num_decode_steps": (
                is_int(self.num_decode_steps, 1, page_len if is_int(page_len) else 1),
                f"an int of 1 .. cache_block_seq_len ({page_len}): a call may enter one new page",
            ),
            "kv_hadamard": (isinstance(self.kv_hadamard, bool | None), "True, False or None"),
            "enable_prefix_caching": (isinstance(self.enable_prefix_caching, bool), "True or False"),
            "batch_invariant": (isinstance(self.batch_invariant, bool), "True or False"),
            "compile_ahead": (isinstance(self.compile_ahead, bool | None), "True, False or None"),
            "logits_processors": (
                isinstance(self.logits_processors, Mapping)
                and all(isinstance(name, str) for name in self.logits_processors)
                and all(isinstance(one, LogitsProcessor) for one in self.logits_processors.values()),
                "LogitsProcessor objects by name",
            ),
            "debug": (isinstance(self.debug, bool), "True or False"),
            "cluster": (self.cluster is None or isinstance(self.cluster, ClusterConfig), "None or a ClusterConfig"),
            "tp": (is_int(self.tp, 1), "an int >= 1: devices of an engine"),
            "dp": (is_int(self.dp, 1), "an int >= 1: engines"),
        }
        check("EngineConfig", self, rules)
        if self.kv_policy is not None and not self._leaves_bits_open:
            accepted = "None beside quant_policy, k_bits or v_bits: it already says the bits of every layer"
            raise ConfigError("EngineConfig", "kv_policy", self.kv_policy, accepted)

    @property
    def _leaves_bits_open(self) -> bool:
        return self.quant_policy is None and self.k_bits is None and self.v_bits is None

    @property
    def leaves_kv_open(self) -> bool:
        """No field says the bits of the KV cache: a checkpoint's own policy counts."""
        return self._leaves_bits_open and self.kv_policy is None

    def kv_bits(self, layer: int) -> tuple[int, int]:
        """Bits of K and of V in a layer.

        Raises:
            ConfigError: kv_policy ends before this layer.
        """
        if self.kv_policy is None:
            bits = _BITS_OF_QUANT_POLICY[self.quant_policy or 0]
            return self.k_bits or bits, self.v_bits or bits
        if layer >= len(self.kv_policy):
            raise ConfigError("EngineConfig", "kv_policy", self.kv_policy, f"an entry for layer {layer} as well")
        return self.kv_policy[layer]


def _layer_bits(policy: Any) -> tuple[tuple[int, int], ...]:
    accepted = "a (bits of K, bits of V) pair of 16, 8 or 4 for every layer"
    if not isinstance(policy, list | tuple) or not policy:
        raise ConfigError("EngineConfig", "kv_policy", policy, accepted)
    for pair in policy:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or any(bits not in KV_BITS for bits in pair):
            raise ConfigError("EngineConfig", "kv_policy", policy, accepted)
    return tuple((k, v) for k, v in policy)
