"""Holds folders that were written as compressed-tensors against the compressed-tensors package itself.

That package needs torch, so this runs in an environment of its own, which has numpy, ml_dtypes and gguf too:

    pip install torch compressed-tensors ml_dtypes gguf && python scripts/check_compressed_tensors.py FOLDER ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch  # noqa: TID251
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file

from checkpoints import AffineTensor, EightBitTensor, open_checkpoint


def check(folder: Path) -> None:
    """Every quantised linear as the package decompresses it, against what we read."""
    checkpoint = open_checkpoint(folder)
    settings = dict(checkpoint.config["quantization_config"])
    config = QuantizationConfig.model_validate(settings)
    scheme = next(iter(config.config_groups.values()))
    compressor = BaseCompressor.get_value_from_registry(config.format)
    stored = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    worst, count = 0.0, 0
    for name in checkpoint.tensors:
        ours = checkpoint.read(name)
        if not isinstance(ours, AffineTensor | EightBitTensor):
            continue
        module = name.removesuffix("weight")
        state = {key.removeprefix(module): t for key, t in stored.items() if key.startswith(module)}
        state["weight_scale"] = state["weight_scale"].to(torch.float32)
        theirs = compressor.decompress(state, scheme)["weight"].to(torch.float32).numpy()
        values = ours.dequantize().T if isinstance(ours, AffineTensor) else ours.dequantize()
        worst, count = max(worst, float(np.abs(theirs - values).max() / np.abs(values).max())), count + 1
    print(f"{folder.name}: {count} linears, largest relative difference {worst:.2g}")
    assert count, "no linear of it is quantised"
    assert worst < 1e-6


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        check(Path(argument))
