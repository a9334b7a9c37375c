"""A Hugging Face folder: its config files and its safetensors, in one file or in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointFileError, ConfigError, CorruptFileError, UnsupportedFormatError
from checkpoints.importers import import_tensors
from checkpoints.model_format import resolve
from checkpoints.safetensors_file import StoredTensor, read_safetensors
from checkpoints.tensors import Checkpoint

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LEGACY_CONFIGS = {"gptq": "quantize_config.json", "awq": "quant_config.json"}
_OTHER_WEIGHTS = ("*.bin", "*.pth", "*.pt", "*.gguf")


def open_folder(path: Path, model_format: str | None = None) -> Checkpoint:
    """Opens a folder with config.json and safetensors; see `checkpoints.open_checkpoint`."""
    config = read_json(path / "config.json", hint="a model folder needs its config.json")
    check_config(path / "config.json", config)
    generation_path = path / "generation_config.json"
    generation_config = read_json(generation_path) if generation_path.exists() else {}
    quantization = resolve(path / "config.json", _quantization(path, config), model_format)
    stored = _stored_tensors(path)
    tensors = import_tensors(path, quantization, stored)
    files = {tensor.file: tensor.file_bytes for tensor in stored.values()}
    return Checkpoint(path, config, generation_config, tensors, [*files.values()])


def read_json(path: Path, *, hint: str = "check that it is there and readable") -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointFileError: the file is missing or unreadable.
        ConfigError: it is not a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointFileError(path, f"cannot be read: {error.strerror or error}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(path, f"is not valid JSON ({error})", hint="download or write it again") from error
    if not isinstance(value, dict):
        raise ConfigError(path, f"holds a JSON {type(value).__name__}", hint="a JSON object is expected")
    return value


def check_config(path: Path, config: dict[str, Any]) -> None:
    """A config must say which model it is; whether that model is known is not this package's business."""
    architectures = config.get("architectures")
    if architectures is None and not isinstance(config.get("model_type"), str):
        hint = 'add it, for example "architectures": ["LlamaForCausalLM"]'
        raise ConfigError(path, "has neither 'architectures' nor 'model_type'", hint=hint)
    is_list = isinstance(architectures, list) and architectures
    if architectures is not None and not (is_list and all(isinstance(name, str) for name in architectures)):
        raise ConfigError(path, f"'architectures' is {architectures!r}", hint="a list of names is expected")


def _quantization(path: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantisation config: in config.json, or in a file of its own as older GPTQ and AWQ checkpoints have it."""
    for key in ("quantization_config", "compression_config"):
        found = config.get(key)
        if isinstance(found, dict):
            default = {"quant_method": "compressed-tensors"} if key == "compression_config" else {}
            return default | found
        if found is not None:
            hint = "a JSON object is expected"
            raise ConfigError(path / "config.json", f"{key!r} is {found!r}", hint=hint)
    for method, name in _LEGACY_CONFIGS.items():
        if (path / name).exists():
            return {"quant_method": method} | read_json(path / name)
    return None


def _stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """All arrays of the folder. A whole model.safetensors goes before an index that does not name it."""
    weight_map = _weight_map(path / _INDEX) if (path / _INDEX).exists() else None
    has_single = (path / _SINGLE).exists()
    if weight_map is None or (has_single and _SINGLE not in weight_map.values()):
        return read_safetensors(path / _SINGLE if has_single else _only_safetensors(path))
    shards = {name: read_safetensors(path / name) for name in sorted(set(weight_map.values()))}
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard]:
            hint = "download index and shards again"
            raise CorruptFileError(path / shard, f"is not in the shard that {_INDEX} names", tensor=tensor, hint=hint)
    return {tensor: shards[shard][tensor] for tensor, shard in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(index, "has no 'weight_map'", hint="download it again")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ConfigError(index, f"its shard {shard!r} is no file name", tensor=tensor, hint="correct it")
    return weight_map


def _only_safetensors(path: Path) -> Path:
    """The one .safetensors file of a folder that names it otherwise (some GPTQ checkpoints do)."""
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(file.name for file in found[:4])
        hint = f"add {_INDEX}, or keep one of them as {_SINGLE}"
        raise CheckpointFileError(path, f"holds {len(found)} safetensors files ({names}) but no index", hint=hint)
    others = [file.name for pattern in _OTHER_WEIGHTS for file in sorted(path.glob(pattern))]
    if others:
        hint = "give the path of a .gguf itself; convert other weights to safetensors"
        raise UnsupportedFormatError(path, f"holds no safetensors but {others[0]}", hint=hint)
    raise CheckpointFileError(path, f"holds no {_SINGLE} and no {_INDEX}", hint="check the path")
