"""Ray Data on one machine: tokens/s of two actors by those of one, each on one CPU.

    python scripts/bench_ray.py [--rows 320] [--out benchmarks/results/ray.json]

Loading and compiling are left out: actors wait for each other once they have answered a batch. Time runs from the first
row that an actor gets to the last answer, so Ray's own work and an uneven end count. `cpus` says how many CPUs an actor
really used, `load_before` how busy the machine was: with other work on it the ratio says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import pyarrow as pa
import ray
from cpu_results import write_results

from turbojax import EngineConfig, GenerationConfig
from turbojax.integrations.ray_data import TurbojaxGenerator

PROMPT_TOKENS, NEW_TOKENS, BATCH_SIZE = 32, 32, 16
ENGINE = EngineConfig(
    session_len=128, max_batch_size=2 * BATCH_SIZE, max_prefill_token_num=512, cache_max_entry_count=257,
    cache_block_seq_len=16, enable_prefix_caching=False,
)  # fmt: skip
GENERATION = GenerationConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True)
BARRIER_S = 600


class Timed(TurbojaxGenerator):
    """Waits until all actors have answered something, and notes of each batch when it began and ended."""

    def __init__(self, folder: str, num_actors: int, model: str | None) -> None:
        super().__init__(model, ENGINE, GENERATION)
        self._pipe(prompts(2 * BATCH_SIZE, seed=1), GENERATION)
        (Path(folder) / str(os.getpid())).touch()
        deadline = time.monotonic() + BARRIER_S
        while len(list(Path(folder).iterdir())) < num_actors and time.monotonic() < deadline:
            time.sleep(0.05)

    async def __call__(self, batch: pa.Table) -> pa.Table:
        began_s, used_s = time.time(), time.process_time()
        answers = await super().__call__(batch)
        ended = {"began_s": began_s, "ended_s": time.time(), "used_s": time.process_time() - used_s, "pid": os.getpid()}
        for name, value in ended.items():
            answers = answers.append_column(name, pa.array([value] * answers.num_rows))
        return answers


def prompts(num: int, seed: int) -> list[list[int]]:
    """Token ids, of no meaning."""
    return np.random.default_rng(seed).integers(100, 40_000, (num, PROMPT_TOKENS)).tolist()


def run(num_actors: int, num_rows: int, model: str | None) -> dict[str, Any]:
    """A job of so many actors."""
    rows = [{"id": i, "tokenized_prompt": ids} for i, ids in enumerate(prompts(num_rows, seed=0))]
    dataset = ray.data.from_items(rows, override_num_blocks=num_rows // BATCH_SIZE)  # no task: actors take all CPUs
    with tempfile.TemporaryDirectory() as folder:
        answers = dataset.map_batches(
            Timed,
            fn_constructor_args=(folder, num_actors, model),
            batch_format="pyarrow",
            batch_size=BATCH_SIZE,
            compute=ray.data.ActorPoolStrategy(
                size=num_actors, max_tasks_in_flight_per_actor=4, max_concurrent_calls_per_actor=2
            ),
            num_cpus=1,
        ).take_all()
    assert sorted(row["id"] for row in answers) == list(range(num_rows))
    return measured(answers)


def measured(answers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Tokens/s, and CPUs of each actor, of the rows of a job."""
    rows = list(answers)
    seconds = max(row["ended_s"] for row in rows) - min(row["began_s"] for row in rows)
    by_actor = {pid: [row for row in rows if row["pid"] == pid] for pid in {row["pid"] for row in rows}}
    num_tokens = sum(row["num_generated_tokens"] for row in rows)
    return {
        "actors": len(by_actor),
        "rows": [len(share) for share in by_actor.values()],
        "seconds": round(seconds, 2),
        "tokens_per_s": round(num_tokens / seconds, 1),
        "cpus": [round(cpus_of(share), 2) for share in by_actor.values()],
    }


def cpus_of(rows: list[dict[str, Any]]) -> float:
    """CPU time by wall time of one batch; those of an actor overlap, so each of them sees all of its work."""
    row = max(rows, key=lambda row: row["ended_s"] - row["began_s"])
    return row["used_s"] / (row["ended_s"] - row["began_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=320)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs; the median ratio counts")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    pairs = [tuple(run(num, args.rows, args.model) for num in (1, 2)) for _ in range(args.repeats)]
    ratios = [round(two["tokens_per_s"] / one["tokens_per_s"], 3) for one, two in pairs]
    figures = {"load_before": round(load, 2), "ratio": sorted(ratios)[len(ratios) // 2], "ratios": ratios}
    sizes = {"rows": args.rows, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "batch_size": BATCH_SIZE}
    found = figures | sizes | {"one_actor": [one for one, _ in pairs], "two_actors": [two for _, two in pairs]}
    print(json.dumps(found, indent=1))
    if args.out:
        versions = {"ray": ray.__version__, "jax": metadata.version("jax"), "python": platform.python_version()}
        write_results(args.out, versions, [found])


if __name__ == "__main__":
    main()
