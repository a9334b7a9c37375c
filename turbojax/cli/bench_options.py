"""The options that all benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from turbojax.bench.settings import Settings
from turbojax.cli import options

_MODEL, _ENGINE, _RESULTS = "Model", "Engine", "Results"


@dataclass(frozen=True)
class Common:
    """Options of every benchmark; see `Settings`."""

    model: Annotated[
        str | None,
        typer.Option("--model", "-m", rich_help_panel=_MODEL, help="A folder, a .gguf file or a Hugging Face repo id."),
    ] = None
    shape: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_MODEL,
            help="Random weights of llama-3.1-8b, llama-3.1-70b, qwen2.5-7b, qwen3-8b or tiny, with no download.",
        ),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_MODEL,
            help="Format of a shape's weights: w4 (default), w4-awq, w8, w8a8, fp8, fp8-block or bf16.",
        ),
    ] = None
    kv: Annotated[int, typer.Option(rich_help_panel=_ENGINE, help="Bits of the KV cache: 16, 8 or 4.")] = 16
    kv_hadamard: Annotated[
        bool, typer.Option("--kv-hadamard", rich_help_panel=_ENGINE, help="Turn queries and keys where K has 4 bits.")
    ] = False
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", rich_help_panel=_ENGINE, help="Bits that no other request changes.")
    ] = False
    dtype: options.Dtype = None
    tp: options.Tp = None
    max_batch_size: options.MaxBatchSize = None
    cache_max_entry_count: options.CacheMaxEntryCount = None
    max_prefill_token_num: Annotated[
        int | None, typer.Option(rich_help_panel=_ENGINE, help="Most prompt tokens of a step.")
    ] = None
    num_decode_steps: Annotated[
        int | None, typer.Option(rich_help_panel=_ENGINE, help="Tokens of a sequence per call while nothing waits.")
    ] = None
    compile_ahead: Annotated[
        bool | None,
        typer.Option(
            "--compile-ahead/--no-compile-ahead",
            rich_help_panel=_ENGINE,
            help="Compile all steps first, not as they are met; by default on a GPU.",
        ),
    ] = None
    temperature: options.Temperature = None
    top_p: options.TopP = None
    top_k: options.TopK = None
    min_p: options.MinP = None
    seed: Annotated[int, typer.Option(help="Of prompts, arrivals, and what is sampled.")] = 0
    bandwidth: Annotated[
        float | None, typer.Option(rich_help_panel=_RESULTS, help="TB/s that the device reads; measured by default.")
    ] = None
    dot_rate: Annotated[
        float | None,
        typer.Option(rich_help_panel=_RESULTS, help="TFLOP/s of its 16-bit dots; measured by default."),
    ] = None
    label: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_RESULTS,
            help="Put before the names of the cases; by default what differs from llama-3.1-8b in w4.",
        ),
    ] = None
    json: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, rich_help_panel=_RESULTS, help="A JSON file: rows of the same cases are replaced."
        ),
    ] = None
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, rich_help_panel=_RESULTS, help="A PNG file: the roofline.")
    ] = None

    def settings(self) -> Settings:
        """The options as settings.

        Raises:
            BenchError, ConfigError: a value is out of range, or contradicts another.
        """
        engine = (
            "dtype", "tp", "max_batch_size", "cache_max_entry_count", "max_prefill_token_num", "num_decode_steps",
        )  # fmt: skip
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        given = {name: value for name, value in sampling.items() if value is not None}
        settings = Settings(
            model=self.model,
            shape=self.shape,
            weights=self.weights,
            kv=self.kv,
            engine={name: getattr(self, name) for name in engine if getattr(self, name) is not None}
            | {"compile_ahead": self.compile_ahead}
            | {name: True for name in ("kv_hadamard", "batch_invariant") if getattr(self, name)},
            sampling=given,
            seed=self.seed,
            bytes_per_s=None if self.bandwidth is None else 1e12 * self.bandwidth,
            flops_per_s=None if self.dot_rate is None else 1e12 * self.dot_rate,
            label=self.label,
            json=self.json,
            plot=self.plot,
        )
        settings.config(), settings.generation()  # raise before anything is loaded
        return settings
