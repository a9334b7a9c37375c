"""Importing a quantised checkpoint to packed weights: MB/s and memory, on a random 7B AWQ checkpoint made on the spot.

    python scripts/bench_import.py [--layers 32] [--out benchmarks/results/import.json]

The rate is bytes of the checkpoint by seconds from opening it to packed weights on the host, its pages in the system's
cache. `floor_s` is a copy of the same bytes by one thread. Anonymous memory is what the process needs; resident memory
counts pages of the mapped file too, which the system takes back when it wants them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from turbojax.models.model import load_model

EMBED, FFW, VOCAB, GROUP = 4096, 11008, 32000, 128  # Llama 2 7B
LINEARS = {
    "self_attn.q_proj": (EMBED, EMBED), "self_attn.k_proj": (EMBED, EMBED), "self_attn.v_proj": (EMBED, EMBED),
    "self_attn.o_proj": (EMBED, EMBED), "mlp.gate_proj": (EMBED, FFW), "mlp.up_proj": (EMBED, FFW),
    "mlp.down_proj": (FFW, EMBED),
}  # fmt: skip
MAX_SHARD_BYTES = 5_000_000_000  # what transformers cuts at by default
NAMES = {"F16": np.float16, "I32": np.int32}


def shapes(num_layers: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of every array of the checkpoint."""
    yield "model.embed_tokens.weight", "F16", (VOCAB, EMBED)
    for i in range(num_layers):
        layer = f"model.layers.{i}."
        for name, (K, N) in LINEARS.items():
            yield f"{layer}{name}.qweight", "I32", (K, N // 8)
            yield f"{layer}{name}.qzeros", "I32", (K // GROUP, N // 8)
            yield f"{layer}{name}.scales", "F16", (K // GROUP, N)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{norm}.weight", "F16", (EMBED,)
    yield "model.norm.weight", "F16", (EMBED,)
    yield "lm_head.weight", "F16", (VOCAB, EMBED)


def write_checkpoint(path: Path, num_layers: int) -> list[int]:
    """Writes random codes under plausible scales; gives the bytes of each shard."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": EMBED, "intermediate_size": FFW, "vocab_size": VOCAB,
        "num_hidden_layers": num_layers, "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "rope_theta": 1e4, "torch_dtype": "float16",
        "quantization_config": {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, Any]] = [{}]
    filled = 0
    for name, dtype, shape in shapes(num_layers):
        num_bytes = int(np.prod(shape)) * np.dtype(NAMES[dtype]).itemsize
        if filled + num_bytes > MAX_SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = {"dtype": dtype, "shape": shape, "data_offsets": (filled, filled + num_bytes)}
        filled += num_bytes
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, header in zip(names, shards, strict=True):
        write_shard(path / file, header)
    weight_map = {name: file for file, header in zip(names, shards, strict=True) for name in header}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return [(path / file).stat().st_size for file in names]


def write_shard(path: Path, header: dict[str, Any]) -> None:
    """A safetensors file of random values, an array at a time."""
    rng, text = np.random.default_rng(0), json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the format's own writer aligns the data
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, entry in header.items():
            size = int(np.prod(entry["shape"]))
            if entry["dtype"] == "I32":
                rng.integers(0, 2**64, size // 2, np.uint64).tofile(file)
            else:
                low, high = (0.005, 0.02) if name.endswith("scales") else (-0.05, 0.05)
                rng.uniform(low, high, size).astype(np.float16).tofile(file)


@contextmanager
def watched(peaks: dict[str, int]) -> Iterator[None]:
    """Notes the most memory that the process has held meanwhile, looking every 10 ms."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            for key, field in (("peak_anonymous_bytes", "RssAnon"), ("peak_resident_bytes", "VmRSS")):
                peaks[key] = max(peaks.get(key, 0), int(lines[field].split()[0]) * 1024)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


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
    floor, peaks = copy_seconds(path), dict[str, int]()
    load_before = os.getloadavg()[0]
    with watched(peaks):
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
        result = {"layers": options.layers} | measure(folder, shards or write_checkpoint(folder, options.layers))
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
