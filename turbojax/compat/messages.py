"""LMDeploy's configs and what comes back, by its names; each field is mapped, or refused where it would do nothing."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from turbojax import configs
from turbojax.engine import response
from turbojax.engine.response import LogprobOf
from turbojax.errors import ConfigError
from turbojax.generation import Extent
from turbojax.rules import check

Fixed = Mapping[str, tuple[Any, str]]
"""Fields of LMDeploy that this engine has no use for: the value that changes nothing, and why there is no other."""


def refuse_others(config: object, fixed: Fixed) -> None:
    """Every field of these has its value.

    Raises:
        ConfigError: names the first that has another.
    """
    rules = {
        name: (getattr(config, name) == value, f"{value!r} alone: {reason}") for name, (value, reason) in fixed.items()
    }
    check(type(config).__name__, config, rules)


_ROPE = "positions are scaled as the model's config.json says, `rope_scaling` there"
_DEVICES = "tp cuts the model and dp repeats it; docs/distributed.md says how several hosts run one engine"
_NO_MIGRATION = "prompts and answers are computed by the same engine"
_STEPS = "max_prefill_token_num says how prompts are cut"


@dataclass
class TurbomindEngineConfig:
    """How the engine runs; `turbojax.EngineConfig` has what the fields mean.

    Attributes:
        model_name: what the model is called, see `TurboMind.model_name`.
        session_len: most tokens of a sequence. More than the model's own limit is that limit, with a warning: it was
            not trained for positions behind it.
        max_batch_size, max_prefill_token_num: None is the engine's own figure, which depends on the device.
        enable_prefix_caching: off by default in LMDeploy; what is generated is the same.

    Raises:
        ConfigError: a field is out of range, or one that this engine has no use for is set.
    """

    FIXED: ClassVar[Fixed] = {
        "rope_scaling_factor": (0.0, _ROPE),
        "use_logn_attn": (False, "attention has the model's own scale"),
        "download_dir": (None, "set HF_HOME to the folder of Hugging Face's cache"),
        "revision": (None, "fetch that revision and give its folder"),
        "cache_chunk_size": (-1, "the KV pool is allocated at once"),
        "num_tokens_per_iter": (0, _STEPS),
        "max_prefill_iters": (1, _STEPS),
        "async_": (1, "the engine always works one step ahead"),
        "devices": (None, "set CUDA_VISIBLE_DEVICES"),
        "empty_init": (False, "weights are loaded with the engine; turbojax.from_params takes them from memory"),
        "communicator": ("nccl", "XLA chooses how devices talk"),
        "hf_overrides": (None, "change the model's config.json"),
        "enable_metrics": (True, "the engine always counts"),
        "language_model_only": (False, "there are no other models to leave out"),
        "cp": (1, _DEVICES),
        "ep": (1, _DEVICES),
        "nnodes": (1, _DEVICES),
        "node_rank": (0, _DEVICES),
        "dist_init_addr": (None, _DEVICES),
    }

    dtype: str = "auto"
    model_name: str | None = None
    model_format: str | None = None
    session_len: int | None = None
    max_batch_size: int | None = None
    cache_max_entry_count: float | int = 0.8
    cache_block_seq_len: int = 64
    enable_prefix_caching: bool = True
    quant_policy: int = 0
    max_prefill_token_num: int | None = None
    tp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    devices: list[int] | None = None
    cache_chunk_size: int = -1
    rope_scaling_factor: float = 0.0
    use_logn_attn: bool = False
    download_dir: str | None = None
    revision: str | None = None
    num_tokens_per_iter: int = 0
    max_prefill_iters: int = 1
    async_: int = 1
    empty_init: bool = False
    language_model_only: bool = False
    communicator: str = "nccl"
    hf_overrides: dict[str, Any] | None = None
    enable_metrics: bool = True

    def __post_init__(self) -> None:
        self.to_turbojax()

    def to_turbojax(self) -> configs.EngineConfig:
        """The same for turbojax."""
        refuse_others(self, self.FIXED)
        if not isinstance(self.model_name, str | None):
            raise ConfigError("TurbomindEngineConfig", "model_name", self.model_name, "None or a name")
        own = {f.name for f in dataclasses.fields(self)} - self.FIXED.keys() - {"model_name"}
        return configs.EngineConfig(**{name: getattr(self, name) for name in own})


@dataclass
class GenerationConfig:
    """How a request generates; `turbojax.GenerationConfig` has what the fields mean.

    Attributes:
        do_sample: None is what LMDeploy does with its own default: a pipeline decodes greedily, and an instance of
            TurboMind, which reads temperature, top_p and top_k alone, samples.
        stream: for `TurboMindInstance.stream_infer`: whether tokens come as they are made, or all at the end. None
            leaves it to its argument `stream_output`. Pipelines have a call for each.

    Raises:
        ConfigError: a field is out of range, or one that this engine has no use for is set.
    """

    FIXED: ClassVar[Fixed] = {
        "spaces_between_special_tokens": (True, "special tokens stand as the model's tokenizer writes them"),
        "logits_processors": (None, "name one of EngineConfig.logits_processors in turbojax.GenerationConfig"),
        "return_ppl": (False, "see Pipeline.get_ppl"),
        "with_cache": (False, _NO_MIGRATION),
        "preserve_cache": (False, _NO_MIGRATION),
        "migration_request": (None, _NO_MIGRATION),
        "return_routed_experts": (False, "experts are chosen inside a step"),
    }

    n: int = 1
    max_new_tokens: int | None = 512
    do_sample: bool | None = None
    top_p: float = 1.0
    top_k: int = 50
    min_p: float = 0.0
    temperature: float = 0.8
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    random_seed: int | None = None
    stop_words: list[str] | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    logits_processors: list[Any] | None = None
    output_logits: Extent | None = None
    output_last_hidden_state: Extent | None = None
    include_stop_str_in_output: bool = False
    stream: bool | None = None
    return_ppl: bool = False
    with_cache: bool = False
    preserve_cache: bool = False
    migration_request: Any = None
    return_routed_experts: bool = False
    repetition_ngram_size: int = 0
    repetition_ngram_threshold: int = 0

    def __post_init__(self) -> None:
        self.to_turbojax(samples=False)

    def to_turbojax(self, *, samples: bool) -> configs.GenerationConfig:
        """The same for turbojax; `samples` is what a `do_sample` that was left open means."""
        refuse_others(self, self.FIXED)
        flags = (None, True, False)
        rules = {name: (getattr(self, name) in flags, "None, True or False") for name in ("do_sample", "stream")}
        check("GenerationConfig", self, rules)
        own = {f.name for f in dataclasses.fields(self)} - self.FIXED.keys() - {"stream", "do_sample", "min_new_tokens"}
        return configs.GenerationConfig(
            do_sample=samples if self.do_sample is None else self.do_sample,
            min_new_tokens=self.min_new_tokens or 0,
            **{name: getattr(self, name) for name in own},
        )


class ResponseType(enum.Enum):
    """How a request stands: SUCCESS goes on, the others end it."""

    SUCCESS = enum.auto()
    FINISH = enum.auto()
    CANCEL = enum.auto()
    INTERNAL_ENGINE_ERROR = enum.auto()


@dataclass
class EngineOutput:
    """What an instance of TurboMind gives: the tokens since its last output.

    Attributes:
        status: of the request.
        token_ids: new tokens, without the stop token that ended them.
        num_token: tokens of the request so far, these included.
        logprobs: of each new token, see `turbojax.Response`.
        logits, last_hidden_state: likewise, where they were asked for.
        error: what went wrong, where the status is an error.
    """

    status: ResponseType
    token_ids: list[int]
    num_token: int
    logprobs: list[LogprobOf] | None = None
    logits: np.ndarray | None = None
    last_hidden_state: np.ndarray | None = None
    error: str | None = None

    @property
    def token_id(self) -> list[int]:
        """`token_ids`, by the name that older scripts have for them."""
        return self.token_ids


@dataclass
class Response:
    """What a pipeline gives, by LMDeploy's names; see `turbojax.Response`."""

    text: str
    generate_token_len: int
    input_token_len: int
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobOf] | None = None
    logits: np.ndarray | None = None
    last_hidden_state: np.ndarray | None = None
    index: int = 0
    cached_tokens: int = 0
    error_message: str | None = None

    @classmethod
    def of(cls, found: response.Response) -> Response:
        return cls(
            found.text, found.num_generated_tokens, found.num_input_tokens, found.finish_reason, found.token_ids,
            found.logprobs, found.logits, found.last_hidden_state, found.index, found.num_cached_tokens, found.error,
        )  # fmt: skip
