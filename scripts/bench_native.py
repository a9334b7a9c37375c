"""Loading a native packed checkpoint beside a plain read of its bytes: 1.3x at most is asked for.

    python scripts/bench_native.py --output benchmarks/results/native.json

The checkpoint has random weights of a 7B model's layers, grouped codes of 4 bits. Reads and loads take turns, the files
in the system's cache; a plain read puts every file into fresh memory with one thread, a load ends when all arrays stand
on the device.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from bench_import import write_checkpoint
from cpu_results import write_results
from rich.console import Console
from rich.table import Table

from turbojax.models.model import load_model
from turbojax.models.native import load_native_model, save_model

TARGET = 1.3


def read_seconds(folder: Path) -> tuple[float, int]:
    """Seconds and bytes of reading every file."""
    start, num_bytes = time.perf_counter(), 0
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb", buffering=0) as file:
            num_bytes += file.readinto(bytearray(path.stat().st_size))
    return time.perf_counter() - start, num_bytes


def load_seconds(folder: Path) -> float:
    start = time.perf_counter()
    jax.block_until_ready(load_native_model(folder, packed=True).weights)
    return time.perf_counter() - start


def make(scratch: Path, num_layers: int) -> Path:
    """Writes the native checkpoint and says where."""
    source, folder = scratch / "awq", scratch / "native"
    source.mkdir()
    write_checkpoint(source, num_layers)
    save_model(load_model(source, dtype="float16", pack=True), folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make(Path(scratch), args.layers)
        load_seconds(folder)
        pairs = [(read_seconds(folder), load_seconds(folder)) for _ in range(args.repeats)]
    num_bytes, ratios = pairs[0][0][1], [load_s / read_s for (read_s, _), load_s in pairs]
    read_s, load_s = median(s for (s, _), _ in pairs), median(s for _, s in pairs)
    table = Table("bytes", "plain read, s", "load, s", "load over read, median", "target")
    verdict = "met" if median(ratios) <= TARGET else "MISSED"
    cells = [f"{num_bytes / 1e6:.0f} MB", f"{read_s:.2f}", f"{load_s:.2f}", f"{median(ratios):.2f}"]
    table.add_row(*cells, f"{TARGET} {verdict}")
    Console().print(table)
    if args.output is not None:
        row = {"layers": args.layers, "bytes": num_bytes, "read_s": read_s, "load_s": load_s}
        row |= {
            "load_over_read": median(ratios),
            "ratios": ratios,
            "target": TARGET,
            "load_average": os.getloadavg()[0],
        }
        write_results(args.output, {"jax": jax.__version__, "orbax-checkpoint": version("orbax-checkpoint")}, [row])


if __name__ == "__main__":
    main()
