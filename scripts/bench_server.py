"""What HTTP costs: the tiny model's tokens a second over a server against the engine's own, 64 streams at once.

    python scripts/bench_server.py [--rounds 5] [--output benchmarks/results/server.json]

Rates are those while all streams are under way. Rounds take turns, engine then server, so that both see the same
machine; the ratio is the median of theirs, by the clock and by the processor time of a token, which other work changes
less; the load average, before and behind, says how much of that there was. The client is another process on the same
cores. From token to socket: from the moment that a step's tokens are on the host until their event was handed to the
kernel, of one more round whose watching costs a little itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from cpu_results import write_results
from lean_client import LETTERS_OF_TOKEN
from rich.console import Console
from rich.table import Table
from server_harness import VOCAB_SIZE, open_pipeline, serving
from token_times import TokenTimes

from turbojax import GenerationConfig
from turbojax.api import Pipeline

PROMPT_LEN, LETTERS = 16, "abcdefgh"
Events = list[tuple[float, int]]
"""(when, how many tokens) of a stream."""

CLIENT = Path(__file__).with_name("lean_client.py")
THREADS = ("engine_thread_us_per_token", "server_thread_us_per_token")
MOST_LOSS, MOST_TOKEN_TO_SOCKET_MS = 0.10, 5.0


class Clocks:
    """CPU time since this was made, in microseconds a token: of the process, of the engine's thread and the server's.

    A thread's own time says what its work costs whatever else the machine does.
    """

    def __init__(self) -> None:
        self._start_s = self._read()

    @staticmethod
    def _read() -> dict[str, float]:
        threads = {thread.name.removeprefix("turbojax-"): thread for thread in threading.enumerate()}
        own = {
            f"{name}_thread_us_per_token": time.clock_gettime(time.pthread_getcpuclockid(threads[name].ident or 0))
            for name in ("engine", "server")
        }
        return {"cpu_us_per_token": time.process_time(), **own}

    def per_token(self, num_tokens: int) -> dict[str, float]:
        return {name: 1e6 * (now_s - self._start_s[name]) / num_tokens for name, now_s in self._read().items()}


def engine_round(pipe: Pipeline, num_streams: int, num_tokens: int) -> dict[str, float]:
    """Streams straight from the pipeline, texts included."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB_SIZE, PROMPT_LEN).tolist() for _ in range(num_streams)]
    config = GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True)
    streams: list[Events] = [[] for _ in prompts]
    clocks = Clocks()
    for piece in pipe.stream_infer(prompts, config):
        streams[piece.index].append((time.perf_counter(), len(piece.token_ids)))
    return {"tokens_per_s": steady_rate(streams), **clocks.per_token(count(streams))}


def server_round(url: str, num_streams: int, num_tokens: int) -> dict[str, float]:
    """The same as chats over HTTP, from a process of its own."""
    rng = np.random.default_rng(0)
    num_letters = LETTERS_OF_TOKEN * PROMPT_LEN
    prompts = ["".join(LETTERS[i] for i in rng.integers(0, 8, num_letters)) for _ in range(num_streams)]
    asked = json.dumps({"prompts": prompts, "max_tokens": num_tokens})
    client = subprocess.Popen([sys.executable, CLIENT, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    client.stdout.readline()  # it has imported what it needs
    clocks = Clocks()
    told, _ = client.communicate(asked + "\n")
    found = json.loads(told)
    streams, num_done = found["streams"], count(found["streams"])
    spent = clocks.per_token(num_done)
    assert num_done == num_streams * num_tokens, num_done
    return {
        "tokens_per_s": steady_rate(streams),
        **spent,
        "client_cpu_us_per_token": 1e6 * found["cpu_s"] / num_done,
        "tokens_per_event": num_done / sum(len(stream) for stream in streams),
    }


def count(streams: list[Events]) -> int:
    return sum(number for stream in streams for _, number in stream)


def steady_rate(streams: list[Events]) -> float:
    """Tokens a second of all streams while every one of them is under way."""
    begin_s, end_s = max(stream[0][0] for stream in streams), min(stream[-1][0] for stream in streams)
    assert end_s > begin_s, "the streams were not all under way at once: give more tokens"
    return sum(number for stream in streams for at_s, number in stream if begin_s < at_s <= end_s) / (end_s - begin_s)


def measure(num_streams: int, num_tokens: int, num_rounds: int, **engine: Any) -> list[dict[str, Any]]:
    """Rows of results."""
    load_before = os.getloadavg()[0]
    with open_pipeline(max_batch_size=num_streams, **engine) as pipe, serving(pipe) as (url, _):
        engine_round(pipe, num_streams, num_tokens), server_round(url, num_streams, num_tokens)
        num_compiled = pipe.metrics.num_compilations
        pairs = [
            (engine_round(pipe, num_streams, num_tokens), server_round(url, num_streams, num_tokens))
            for _ in range(num_rounds)
        ]
        assert pipe.metrics.num_compilations == num_compiled, "steps were compiled while they were timed"
        with TokenTimes() as times:
            server_round(url, num_streams, num_tokens)
    ratios = [http["tokens_per_s"] / direct["tokens_per_s"] for direct, http in pairs]
    rows = [summary("engine", [direct for direct, _ in pairs]), summary("server", [http for _, http in pairs])]
    by_cpu = statistics.median(direct["cpu_us_per_token"] / http["cpu_us_per_token"] for direct, http in pairs)
    by_clock = {"value": statistics.median(ratios), "unit": "ratio", "of_rounds": sorted(ratios)}
    rows.append({"case": "server over engine", **by_clock, "by_processor_time": by_cpu})
    p50, p95, p99 = np.percentile(times.milliseconds, (50, 95, 99)).tolist()
    rows.append({"case": "token to socket", "value": p50, "unit": "ms", "p95": p95, "p99": p99})
    shape = {"streams": num_streams, "tokens_each": num_tokens, "decode_steps_a_call": engine["num_decode_steps"]}
    shape["load_average"] = [load_before, os.getloadavg()[0]]
    name = f", {engine['num_decode_steps']} tokens a call"
    return [{**row, "case": row["case"] + name, **shape} for row in rows]


def summary(case: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of rounds."""
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    return {"case": case, "value": medians.pop("tokens_per_s"), "unit": "tok/s", **medians}


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("case", box=None)
    for column in ("value", "unit", "engine's thread", "server's, us/token", "target"):
        table.add_column(column, justify="right")
    targets = {"ratio": f">= {1 - MOST_LOSS:g}", "ms": f"< {MOST_TOKEN_TO_SOCKET_MS:g}"}
    for row in rows:
        spent = [f"{row[name]:.1f}" if name in row else "" for name in THREADS]
        figures = (f"{row['value']:,.4g}", row["unit"], *spent)
        table.add_row(row["case"], *figures, targets.get(row["unit"], ""))
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=448, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode-steps", type=int, nargs="*", default=[4], help="tokens of a sequence a call")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = [
        row
        for steps in options.decode_steps
        for row in measure(options.streams, options.tokens, options.rounds, num_decode_steps=steps)
    ]
    show(rows)
    if options.output is not None:
        names = ("jax", "numpy", "fastapi", "uvicorn", "uvloop", "httptools")
        write_results(options.output, {name: version(name) for name in names}, rows)


if __name__ == "__main__":
    main()
