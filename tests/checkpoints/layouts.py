"""The documented layouts of quantised linears, written one integer at a time: what importers are held against."""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BF16 = ml_dtypes.bfloat16


def stream(codes, bits):
    """int32 words of a row of codes, first code in the lowest bits, codes going on in the next word."""
    number = sum(int(code) << bits * i for i, code in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    return np.array([number >> 32 * w & 0xFFFFFFFF for w in range(count)], np.uint32).view(np.int32)


def whole(codes, bits):
    """The same with 32 // bits codes a word, none of them cut."""
    per_word = 32 // bits
    return np.concatenate([stream(codes[i : i + per_word], bits) for i in range(0, len(codes), per_word)])


def rows(pack, codes, bits):
    return np.stack([pack(row, bits) for row in codes])


def columns(pack, codes, bits):
    return rows(pack, codes.T, bits).T


def awq_rows(codes):
    """int32 [R, C / 8]: nibble i of a word is column AWQ_ORDER[i] of its eight."""
    eights = codes.reshape(codes.shape[0], -1, 8)[:, :, AWQ_ORDER]
    return rows(stream, eights.reshape(codes.shape), 4)


def awq(codes, zero, scale):
    """Tensors of one AWQ linear from codes [K, N], zero points and scales [G, N]."""
    return {"qweight": awq_rows(codes), "qzeros": awq_rows(zero), "scales": scale}


def gptq(codes, zero, scale, bits, *, group, version=1):
    """Tensors of one GPTQ linear; `group` [K] is the group of each row."""
    return {
        "qweight": columns(stream, codes, bits), "qzeros": rows(stream, zero - (version == 1), bits),
        "scales": scale, "g_idx": group.astype(np.int32),
    }  # fmt: skip


def packed(codes, zero, scale, bits, *, group=None):
    """Tensors of one compressed-tensors pack-quantized linear; zero None is symmetric."""
    tensors = {
        "weight_packed": rows(whole, codes.T, bits), "weight_scale": scale.T,
        "weight_shape": np.array(codes.T.shape, np.int64),
    }  # fmt: skip
    if zero is not None:
        tensors["weight_zero_point"] = columns(whole, zero.T, bits)
    return tensors if group is None else tensors | {"weight_g_idx": group.astype(np.int32)}


def pack_config(bits, group_size, symmetric, *, strategy="group", activations=None):
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group_size}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def folder(path, tensors, quantization=None, config=None):
    """A checkpoint of the given tensors."""
    path.mkdir(exist_ok=True)
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, path / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"]} | (config or {})
    if quantization is not None:
        config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config))
    return path


def of(module, tensors):
    return {f"{module}.{leaf}": tensor for leaf, tensor in tensors.items()}
