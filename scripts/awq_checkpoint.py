"""AWQ checkpoints of any shape, made on the spot, in files as large as transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

GROUP = 128
MAX_FILE_BYTES = 5_000_000_000  # what transformers cuts at by default
NAMES = {"F16": np.float16, "I32": np.int32}
QUANTISATION = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP}


def arrays(config: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of every array of a Llama with this config.json."""
    embed, ffw, vocab = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    kv_dim = embed // config["num_attention_heads"] * config["num_key_value_heads"]
    linears = {
        "self_attn.q_proj": (embed, embed), "self_attn.k_proj": (embed, kv_dim), "self_attn.v_proj": (embed, kv_dim),
        "self_attn.o_proj": (embed, embed), "mlp.gate_proj": (embed, ffw), "mlp.up_proj": (embed, ffw),
        "mlp.down_proj": (ffw, embed),
    }  # fmt: skip
    yield "model.embed_tokens.weight", "F16", (vocab, embed)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, (K, N) in linears.items():
            yield f"{layer}{name}.qweight", "I32", (K, N // 8)
            yield f"{layer}{name}.qzeros", "I32", (K // GROUP, N // 8)
            yield f"{layer}{name}.scales", "F16", (K // GROUP, N)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{norm}.weight", "F16", (embed,)
    yield "model.norm.weight", "F16", (embed,)
    yield "lm_head.weight", "F16", (vocab, embed)


def write_checkpoint(path: Path, config: Mapping[str, Any], *, is_sparse: bool = False) -> list[int]:
    """Writes random codes under plausible scales; gives the bytes of each file.

    Args:
        path: an empty folder.
        config: of the model; how it is quantised is added.
        is_sparse: everything is zero and takes no room on the disk; it is read like any other.
    """
    (path / "config.json").write_text(json.dumps(dict(config) | {"quantization_config": QUANTISATION}))
    headers: list[dict[str, Any]] = [{}]
    filled = 0
    for name, dtype, shape in arrays(config):
        num_bytes = int(np.prod(shape)) * np.dtype(NAMES[dtype]).itemsize
        if filled + num_bytes > MAX_FILE_BYTES:
            headers.append({})
            filled = 0
        headers[-1][name] = {"dtype": dtype, "shape": shape, "data_offsets": (filled, filled + num_bytes)}
        filled += num_bytes
    names = [f"model-{i + 1:05}-of-{len(headers):05}.safetensors" for i in range(len(headers))]
    for file, header in zip(names, headers, strict=True):
        write_file(path / file, header, is_sparse)
    weight_map = {name: file for file, header in zip(names, headers, strict=True) for name in header}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return [(path / file).stat().st_size for file in names]


def write_file(path: Path, header: dict[str, Any], is_sparse: bool) -> None:
    """A safetensors file, an array at a time."""
    rng, text = np.random.default_rng(0), json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the format's own writer aligns the data
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if is_sparse:
            file.truncate(file.tell() + max(entry["data_offsets"][1] for entry in header.values()))
            return
        for name, entry in header.items():
            size = int(np.prod(entry["shape"]))
            if entry["dtype"] == "I32":
                rng.integers(0, 2**64, size // 2, np.uint64).tofile(file)
            else:
                low, high = (0.005, 0.02) if name.endswith("scales") else (-0.05, 0.05)
                rng.uniform(low, high, size).astype(np.float16).tofile(file)
