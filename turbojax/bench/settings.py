"""What every benchmark is told: the model, how the engine runs, how tokens are picked, where results go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turbojax.bench.errors import BenchError
from turbojax.configs import EngineConfig, GenerationConfig

REFERENCE_SHAPE, DEFAULT_WEIGHTS = "llama-3.1-8b", "w4"
_ENGINE_NAMES = {"kv_hadamard": "hadamard", "batch_invariant": "batch-invariant"}
_SAMPLING_NAMES = {"temperature": "temperature", "top_p": "top-p", "top_k": "top-k", "min_p": "min-p"}


@dataclass(frozen=True)
class Settings:
    """See the command line's options.

    Attributes:
        model: of a checkpoint; None where `shape` names one.
        shape: a name in `models.shapes.SHAPES`; None where `model` names a checkpoint.
        weights: format of the weights of a shape; None is `DEFAULT_WEIGHTS`.
        kv: bits of the KV cache.
        engine: fields of EngineConfig that were given; the benchmark sets others to fit its load.
        sampling: fields of GenerationConfig that were given, the others are off; greedy without any.
        seed: of prompts, arrivals and what is sampled.
        bytes_per_s, flops_per_s: the device's rates; None measures them.
        label: put before the names of the cases; None says shape and weights where they are not the reference's.
        json: a file of results to add to.
        plot: a PNG file to write.

    Raises:
        BenchError: fields contradict each other.
    """

    model: str | None = None
    shape: str | None = None
    weights: str | None = None
    kv: int = 16
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    label: str | None = None
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if (self.model is None) == (self.shape is None):
            raise BenchError("give either model (a checkpoint) or shape (random weights)")
        if self.weights is not None and self.shape is None:
            raise BenchError("weights is the format of a shape's random weights; a checkpoint has its own")
        if self.kv not in (16, 8, 4):
            raise BenchError(f"kv: {self.kv}, accepted: 16, 8 or 4 bits")
        for name, rate in (("bandwidth", self.bytes_per_s), ("dot-rate", self.flops_per_s)):
            if rate is not None and not 0 < rate < float("inf"):
                raise BenchError(f"{name}: {rate}, a number above 0 is expected")

    def config(self, **defaults: Any) -> EngineConfig:
        """The engine's config: what was given, then what the benchmark needs.

        Pages of an earlier round are not found again unless that is asked for: the floors count every prompt token.
        """
        needed = {"quant_policy": 0 if self.kv == 16 else self.kv, "enable_prefix_caching": False}
        return EngineConfig(**defaults | needed | dict(self.engine))

    def generation(self) -> GenerationConfig:
        """How tokens are picked: as the name of the case says, without the defaults of GenerationConfig."""
        off: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return GenerationConfig(do_sample=bool(self.sampling), random_seed=self.seed, **off | dict(self.sampling))

    def case(self, name: str, *, sampled: bool = True, names_kv: bool = True) -> str:
        """The name of a case: "decode b64 4k" becomes "qwen3-8b decode b64 4k kv8 top-p 0.9", for example."""
        if self.label is not None:
            prefix = [self.label]
        elif self.shape is None:
            prefix = [Path(str(self.model)).name]
        else:
            weights = self.weights or DEFAULT_WEIGHTS
            apart = {self.shape: self.shape != REFERENCE_SHAPE, weights: weights != DEFAULT_WEIGHTS}
            prefix = [part for part, differs in apart.items() if differs]
        picks = self.sampling.items() if sampled else ()
        suffix = [f"{_SAMPLING_NAMES[k]} {v:g}" for k, v in picks if k in _SAMPLING_NAMES]
        kv = (f"kv{self.kv}",) if names_kv else ()
        how = [shown for field, shown in _ENGINE_NAMES.items() if self.engine.get(field)]
        devices = (f"tp{self.num_shards}",) if self.num_shards > 1 else ()
        return " ".join(part for part in (*prefix, name, *kv, *devices, *how, *suffix) if part)

    @property
    def num_shards(self) -> int:
        """Devices that the model is cut between."""
        return int(self.engine.get("tp", 1))
