"""Importing a quantised checkpoint to packed weights: MB/s and memory, on a random 7B AWQ checkpoint made on the spot.

    python scripts/bench_import.py [--layers 32] [--out benchmarks/results/import.json]

The rate is bytes of the checkpoint by seconds from opening it to packed weights on the host, its pages in the system's
cache. `floor_s` is a copy of the same bytes by one thread. Anonymous memory is what the process needs; resident memory
counts pages of the mapped file too, which the system takes back when it wants them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from awq_checkpoint import write_checkpoint
from host_memory import peaks_of, status_bytes

from turbojax.models.model import load_model

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000,
    "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
    "rope_theta": 1e4, "torch_dtype": "float16",
}  # fmt: skip
MEASURES = {
    name: functools.partial(status_bytes, field)
    for name, field in {"peak_anonymous_bytes": "RssAnon", "peak_resident_bytes": "VmRSS"}.items()
}


def copy_seconds(path: Path) -> float:
    """A plain copy of every byte of the weights, by one thread, 64 MiB at a time."""
    start, into = time.perf_counter(), np.empty(1 << 26, np.uint8)
    for file in sorted(path.glob("*.safetensors")):
        mapped = np.memmap(file, np.uint8, "r")
        for at in range(0, mapped.size, into.size):
            piece = mapped[at : at + into.size]
            into[: piece.size] = piece
    return time.perf_counter() - start


def measure(path: Path, shard_bytes: list[int]) -> dict[str, Any]:
    """Imports the checkpoint once; see the module's text."""
    floor, load_before = copy_seconds(path), os.getloadavg()[0]
    with peaks_of(MEASURES) as peaks:
        start, cpu_start = time.perf_counter(), time.process_time()
        model = load_model(path, dtype="float16", pack=True)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    assert type(model.weights.segments[0].o.weight).__name__ == "PackedAffine"
    total, largest = sum(shard_bytes), max(shard_bytes)
    return {
        "checkpoint_bytes": total, "largest_shard_bytes": largest, "seconds": seconds, "cpu_seconds": cpu_seconds,
        "mb_per_s": total / seconds / 1e6, "mb_per_cpu_s": total / cpu_seconds / 1e6, "floor_s": floor,
        "cores": os.cpu_count(), "other_load": load_before, **peaks,
        "anonymous_over_largest_shard": peaks["peak_anonymous_bytes"] / largest,
        "resident_over_largest_shard": peaks["peak_resident_bytes"] / largest,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made, and kept; default: a temporary one")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        shards = [file.stat().st_size for file in sorted(folder.glob("*.safetensors"))]
        config = LLAMA_2_7B | {"num_hidden_layers": options.layers}
        result = {"layers": options.layers} | measure(folder, shards or write_checkpoint(folder, config))
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
