"""Readers of quantised layouts, from their description alone and one integer at a time: nothing of `checkpoints`."""

import json

import ml_dtypes
import numpy as np

DTYPES = {"F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64, "I8": np.int8, "U8": np.uint8,
          "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}  # fmt: skip
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def arrays_of(folder):
    """Every array of a folder, and its quantization_config."""
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    found = {}
    for file in sorted(set(weight_map.values()) or {"model.safetensors"}):
        raw = (folder / file).read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        for name, entry in header.items():
            if name != "__metadata__":
                a, b = (start + offset for offset in entry["data_offsets"])
                found[name] = np.frombuffer(raw[a:b], DTYPES[entry["dtype"]]).reshape(entry["shape"])
                assert weight_map.get(name, file) == file
    return found, json.loads((folder / "config.json").read_text())["quantization_config"]


def codes_in(words, bits):
    """The codes of a row of words, first code in the lowest bits."""
    mask = (1 << bits) - 1
    return [int(word) >> shift & mask for word in words for shift in range(0, 32, bits)]


def awq(arrays, module, config):
    """codes [K, N], zero points [G, N], scales [G, N], group of each input."""

    def unpack(words):
        rows = []
        for row in words:
            columns = [0] * (8 * len(row))
            for w, word in enumerate(row):
                for nibble, column in enumerate(AWQ_ORDER):
                    columns[8 * w + column] = int(word) >> 4 * nibble & 15
            rows.append(columns)
        return np.array(rows)

    codes = unpack(arrays[f"{module}.qweight"])
    groups = np.arange(len(codes)) // config["group_size"]
    return codes, unpack(arrays[f"{module}.qzeros"]), arrays[f"{module}.scales"], groups


def gptq(arrays, module, config):
    bits, shift = config["bits"], {"gptq": 1, "gptq_v2": 0}[config["checkpoint_format"]]
    codes = np.array([codes_in(column, bits) for column in arrays[f"{module}.qweight"].T]).T
    zeros = np.array([codes_in(row, bits) for row in arrays[f"{module}.qzeros"]]) + shift
    return codes, zeros, arrays[f"{module}.scales"], arrays[f"{module}.g_idx"]


def compressed(arrays, module, config):
    weights = config["config_groups"]["group_0"]["weights"]
    bits, (out_dim, in_dim) = weights["num_bits"], arrays[f"{module}.weight_shape"]
    codes = np.array([codes_in(row, bits)[:in_dim] for row in arrays[f"{module}.weight_packed"]]).T
    scale = arrays[f"{module}.weight_scale"].T
    zeros = np.full(scale.shape, 1 << bits - 1)
    if not weights["symmetric"]:
        packed = arrays[f"{module}.weight_zero_point"]
        zeros = np.array([codes_in(column, bits)[:out_dim] for column in packed.T])
    return codes, zeros, scale, np.arange(in_dim) // weights["group_size"]


def values(codes, zeros, scale, groups):
    """[K, N]."""
    return (codes - zeros[groups]) * scale[groups].astype(np.float64)
