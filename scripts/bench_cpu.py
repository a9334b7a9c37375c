"""Speed of the default model on this machine's CPU, as users run it; torch beside it where installed.

    python scripts/bench_cpu.py [--runs 3] [--output benchmarks/results/cpu.json]

Decode rates are steady states of 128 tokens behind 16-token prompts; prefill is 512 tokens to the first token;
cold starts are new processes with an empty and with a filled compilation cache. Medians of `--runs` after a warm-up.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from cpu_results import write_results
from rich.console import Console
from rich.table import Table

NUM_DECODED, PROMPT_LEN, PREFILL_LEN, CHAT_LEN = 128, 16, 512, 100
TARGETS = {
    "decode, batch 1": (25, 40),
    "decode, batch 8": (110, 200),
    "prefill of 512 tokens": (420, 600),
    "first token of 100, warm": (1.0, None),
    "cold start to first token": (30.0, None),
    "second start to first token": (12.0, None),
    "peak memory": (2.5, None),
}
COLD_START = (
    "from turbojax import GenerationConfig, pipeline, EngineConfig\n"
    "with pipeline(backend_config=EngineConfig(session_len=2048)) as pipe:\n"
    "    next(pipe.stream_infer('Why is the sky blue?', GenerationConfig(max_new_tokens=4)))\n"
)


def median(run: Callable[[], float], runs: int) -> tuple[float, list[float]]:
    """Median of `runs` results after one that does not count."""
    run()
    results = [run() for _ in range(runs)]
    return statistics.median(results), results


def prompt_ids(length: int) -> list[int]:
    return np.random.default_rng().integers(20, 49_000, length).tolist()


class Engine:
    """The pipeline, timed from outside."""

    def __init__(self) -> None:
        from turbojax import EngineConfig, pipeline

        self.pipe = pipeline(backend_config=EngineConfig(session_len=2048, max_batch_size=8, max_prefill_token_num=512))

    def decode_rate(self, batch: int) -> float:
        """Tokens per second of all sequences between their first and their last piece."""
        from turbojax import GenerationConfig

        config = GenerationConfig(max_new_tokens=NUM_DECODED, ignore_eos=True)
        begin = counted = 0.0
        waiting = set(range(batch))
        for piece in self.pipe.stream_infer([prompt_ids(PROMPT_LEN) for _ in range(batch)], config):
            waiting.discard(piece.index)
            if begin:
                counted += len(piece.token_ids)
            elif not waiting:
                begin = time.perf_counter()
        return counted / (time.perf_counter() - begin)

    def first_token_s(self, length: int) -> float:
        from turbojax import GenerationConfig

        begin = time.perf_counter()
        self.pipe(prompt_ids(length), GenerationConfig(max_new_tokens=1, ignore_eos=True))
        return time.perf_counter() - begin


def cold_start_s(cache: str) -> float:
    """A new process from its start to its first token, with the compilation cache in a folder."""
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", COLD_START], check=True, env=env)
    return time.perf_counter() - begin


def measure_engine(runs: int) -> list[dict]:
    """One row a figure: case, unit, value, all runs."""
    rows = []

    def row(case: str, unit: str, run: Callable[[], float]) -> None:
        value, results = median(run, runs)
        rows.append({"case": case, "unit": unit, "value": value, "runs": results})

    engine = Engine()
    with engine.pipe:
        row("decode, batch 1", "tokens/s", lambda: engine.decode_rate(1))
        row("decode, batch 8", "tokens/s", lambda: engine.decode_rate(8))
        row("prefill of 512 tokens", "tokens/s", lambda: PREFILL_LEN / engine.first_token_s(PREFILL_LEN))
        row("first token of 100, warm", "s", lambda: engine.first_token_s(CHAT_LEN))
    with tempfile.TemporaryDirectory() as cache:
        for case in ("cold start to first token", "second start to first token"):
            rows.append({"case": case, "unit": "s", "value": cold_start_s(cache)})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    rows.append({"case": "peak memory", "unit": "GiB", "value": peak})
    return rows


def measure_torch(runs: int) -> dict[str, float]:
    """The same shapes through transformers and torch in float32, with random weights: speed does not depend on them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()

    @torch.inference_mode()
    def decode_rate(batch: int) -> float:
        out = model(torch.randint(0, 49_000, (batch, PROMPT_LEN)), use_cache=True, logits_to_keep=1)
        begin = time.perf_counter()
        for _ in range(NUM_DECODED):
            out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
        return batch * NUM_DECODED / (time.perf_counter() - begin)

    @torch.inference_mode()
    def prefill_rate() -> float:
        begin = time.perf_counter()
        model(torch.randint(0, 49_000, (1, PREFILL_LEN)), use_cache=True, logits_to_keep=1)
        return PREFILL_LEN / (time.perf_counter() - begin)

    return {
        "decode, batch 1": median(lambda: decode_rate(1), runs)[0],
        "decode, batch 8": median(lambda: decode_rate(8), runs)[0],
        "prefill of 512 tokens": median(prefill_rate, runs)[0],
    }


def print_table(rows: list[dict]) -> None:
    table = Table("case", "unit", "turbojax", "torch float32", "must", "aim")
    for row in rows:
        must, aim = TARGETS[row["case"]]
        beside = row.get("torch_float32")
        cells = [
            f"{row['value']:.1f}",
            "" if beside is None else f"{beside:.1f}",
            str(must),
            "" if aim is None else str(aim),
        ]
        table.add_row(row["case"], row["unit"], *cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = measure_engine(args.runs)
    versions = {name: version(name) for name in ("jax", "jaxlib", "numpy")}
    if importlib.util.find_spec("torch") is not None:
        beside = measure_torch(args.runs)
        versions["torch"] = version("torch")
        for row in rows:
            row["torch_float32"] = beside.get(row["case"])
    print_table(rows)
    if args.output is not None:
        write_results(args.output, versions, rows)


if __name__ == "__main__":
    main()
