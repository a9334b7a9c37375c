"""Host memory of loading into shards: an AWQ checkpoint as wide as Llama 3.1 70B, against its largest file.

    python scripts/bench_load_shards.py --out benchmarks/results/load_shards.json     # two simulated devices
    JAX_PLATFORMS=cuda python scripts/bench_load_shards.py --layers 80                # two GPUs

`host_bytes` is the most anonymous memory at any moment, beyond what the process had before and beyond what lies on the
devices. Simulated ones lie in the same memory, so only as many of the 80 layers fit as `--layers` says; what the host
holds depends on how wide a layer is, not on how many there are. The files are sparse.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()

import jax
import numpy as np
from awq_checkpoint import write_checkpoint
from cpu_results import write_results
from host_memory import peaks_of, status_bytes

from turbojax.models.model import load_model
from turbojax.models.shapes import SHAPES
from turbojax.sharding import device_bytes, placements

SHAPE, TP = "llama-3.1-70b", 2


def simulated_bytes() -> int:
    """Memory of this process that stands for devices; several arrays may show one buffer."""
    buffers: dict[int, int] = {}
    for array in jax.live_arrays("cpu"):
        try:
            parts = [shard.data for shard in array.addressable_shards]
            buffers |= {part.unsafe_buffer_pointer(): part.nbytes for part in parts}
        except RuntimeError:  # donated since the list was made
            continue
    return sum(buffers.values())


def copy_to_devices() -> None:
    """Simulated devices take host arrays over as they are; real ones have a copy, while the host still has its own."""
    put = jax.device_put

    def copy(x: Any, *args: Any, **options: Any) -> Any:
        return put(x, *args, **options, **({"may_alias": False} if isinstance(x, np.ndarray) else {}))

    jax.device_put = copy  # type: ignore[assignment]


def measure(path: Path, file_bytes: list[int]) -> dict[str, Any]:
    """Loads the checkpoint once; see the module's text."""
    [placement] = placements(TP, 1)
    is_simulated = jax.default_backend() == "cpu"
    if is_simulated:
        copy_to_devices()
    before = status_bytes("RssAnon")

    def host_bytes() -> int:
        return status_bytes("RssAnon") - before - (simulated_bytes() if is_simulated else 0)

    start = time.perf_counter()
    with peaks_of({"host_bytes": host_bytes}) as peaks:
        model = load_model(path, dtype="bfloat16", pack=True, placement=placement)
        jax.block_until_ready(model.weights)
    seconds, largest = time.perf_counter() - start, max(file_bytes)
    return {
        "devices": f"{TP} x {jax.devices()[0].device_kind}", "layers": model.spec.num_layers,
        "checkpoint_bytes": sum(file_bytes), "files": len(file_bytes), "largest_file_bytes": largest,
        "bytes_of_a_device": device_bytes(model.weights), **peaks,
        "host_over_largest_file": round(peaks["host_bytes"] / largest, 3), "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = SHAPES[SHAPE] | {"num_hidden_layers": options.layers}
        row = {"shape": SHAPE} | measure(Path(folder), write_checkpoint(Path(folder), config, is_sparse=True))
    print(row)
    if options.out:
        write_results(options.out, {"jax": metadata.version("jax")}, [row])


if __name__ == "__main__":
    main()
