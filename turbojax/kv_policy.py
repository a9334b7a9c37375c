"""The precision of its KV cache that a checkpoint carries with it: read when an engine leaves it open, and written."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turbojax.configs import KV_BITS, EngineConfig
from turbojax.errors import ModelConfigError

ENTRY = "turbojax"  # of config.json
K_SCALE = "turbojax_k_scale.npy"
SIDE_CAR = ".turbojax.json"  # behind the name of a file that has no config.json


@dataclass(frozen=True)
class KVPolicy:
    """Bits of K and of V of every layer, and whether K of 4 bits goes with a Hadamard matrix; see `EngineConfig`."""

    layers: tuple[tuple[int, int], ...]
    hadamard: bool = False

    def entry(self) -> dict[str, Any]:
        """As files hold it."""
        return {"kv_policy": [list(bits) for bits in self.layers], "kv_hadamard": self.hadamard}


def file_of(path: Path) -> Path:
    """The file that says a checkpoint's policy: config.json of a folder, a side-car of a file."""
    return path / "config.json" if path.is_dir() else path.with_name(path.name + SIDE_CAR)


def policy_of(entry: Any, file: Path) -> KVPolicy | None:
    """The policy of an entry; None where it has none.

    Raises:
        ModelConfigError: the entry is of another kind; names the file.
    """
    if entry is None or entry == {}:
        return None
    found = entry if isinstance(entry, Mapping) else {}
    layers: Any = found.get("kv_policy")
    hadamard = found.get("kv_hadamard", False)
    if not are_bits(layers) or not isinstance(hadamard, bool):
        raise ModelConfigError(
            f"{file}: the entry {ENTRY!r} is {entry!r}; kv_policy must be a [bits of K, bits of V] of 16, 8 or 4 for "
            "every layer, and kv_hadamard true or false; remove the entry, or make it with `turbojax lite calibrate`"
        )
    return KVPolicy(tuple((k, v) for k, v in layers), hadamard)


def are_bits(layers: Any) -> bool:
    """Whether this is a non-empty list of pairs of bits, as JSON has it."""
    pairs = layers if isinstance(layers, list) else []
    return bool(pairs) and all(isinstance(pair, list) and len(pair) == 2 and {*pair} <= {*KV_BITS} for pair in pairs)


def policy_in(config: Mapping[str, Any], path: Path) -> KVPolicy | None:
    """The policy in a model's config, which was read from `path`."""
    policy = policy_of(config.get(ENTRY), path)
    num_layers = config.get("num_hidden_layers")
    if policy is not None and isinstance(num_layers, int) and len(policy.layers) != num_layers:
        raise ModelConfigError(
            f"{path}: kv_policy of the entry {ENTRY!r} has {len(policy.layers)} layers, the model has {num_layers}"
        )
    return policy


def read_json(file: Path) -> dict[str, Any]:
    """Raises ModelConfigError where the file is no JSON object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{file}: is no valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ModelConfigError(f"{file}: a JSON object is expected")
    return found


def read_kv_policy(path: Path) -> KVPolicy | None:
    """The policy of a Hugging Face folder or a .gguf file; None where it has none.

    Raises:
        ModelConfigError: what says it is broken.
    """
    file = file_of(path)
    if not file.is_file():
        return None
    found = read_json(file)
    return policy_in(found if path.is_dir() else {ENTRY: found}, file)


def write_kv_policy(path: Path, policy: KVPolicy) -> Path:
    """Makes the policy a checkpoint's own; the file is replaced whole, and what else it says stays.

    Returns:
        The file that says it.

    Raises:
        ModelConfigError: the folder has no config.json to write to, or a broken one.
        OSError: it cannot be written.
    """
    file = file_of(path)
    if path.is_dir():
        if not file.is_file():
            raise ModelConfigError(f"{path}: has no config.json to write the policy to; give the folder it came from")
        config = read_json(file)
        content = config | {ENTRY: (config.get(ENTRY) or {}) | policy.entry()}
    else:
        content = policy.entry()
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".json", delete=False, encoding="utf-8") as new:
        new.write(json.dumps(content, indent=2) + "\n")
    os.chmod(new.name, 0o644)
    Path(new.name).replace(file)
    return file


def scale_file(path: Path) -> Path:
    """Where a checkpoint keeps the scale of its keys: a .npy file in its folder, or behind the name of its file."""
    return path / K_SCALE if path.is_dir() else path.with_name(f"{path.name}.{K_SCALE}")


def read_k_scale(path: Path) -> np.ndarray | None:
    """float32 [layers, K, H], what keys are multiplied by before the Hadamard matrix; None where nothing says it.

    Raises:
        ModelConfigError: the file is broken.
    """
    file = scale_file(path)
    if not file.is_file():
        return None
    try:
        scale = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ModelConfigError(
            f"{file}: is no .npy file ({error}); make it again with `turbojax lite calibrate`"
        ) from error
    if scale.dtype != np.float32 or scale.ndim != 3 or not np.all(np.isfinite(scale) & (scale > 0)):
        raise ModelConfigError(f"{file}: must be float32 [layers, KV heads, head dim], finite and above 0")
    return scale


def write_k_scale(path: Path, scale: np.ndarray) -> Path:
    """Keeps the scale with a checkpoint; the file is replaced whole."""
    file = scale_file(path)
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".npy", delete=False) as new:
        np.save(new, scale.astype(np.float32))
    os.chmod(new.name, 0o644)
    Path(new.name).replace(file)
    return file


def with_kv_policy(config: EngineConfig, policy: KVPolicy | None) -> EngineConfig:
    """The config, with the policy where it leaves the KV cache open."""
    if policy is None or not config.leaves_kv_open:
        return config
    hadamard = policy.hadamard if config.kv_hadamard is None else config.kv_hadamard
    return dataclasses.replace(config, kv_policy=policy.layers, kv_hadamard=hadamard)
