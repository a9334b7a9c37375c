"""`quant_method: compressed-tensors` with eight-bit weights and activations: int8 by channel, e4m3 by tensor,
channel or block of 128 x 128."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from checkpoints.eight_bit import BLOCK
from checkpoints.errors import ConfigError, UnsupportedFormatError
from checkpoints.importers.eight_bit import expect, import_eight_bit
from checkpoints.safetensors_file import StoredTensor
from checkpoints.tensors import LogicalTensor

FORMATS = ("int-quantized", "float-quantized", "naive-quantized")


def import_compressed_tensors(
    path: Path, quantization: dict[str, Any], stored: Mapping[str, StoredTensor]
) -> Iterable[LogicalTensor]:
    """See `checkpoints.importers.Importer`."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        reason = f"quantization_config: config_groups is {groups!r}"
        raise ConfigError(path / "config.json", reason, hint="a JSON object with a group at least is expected")
    for name, group in groups.items():
        check_group(path, f"config_groups.{name}", group, quantization.get("format"))
    for key in ("transform_config", "sparsity_config"):  # rotations of activations; weights with zeros squeezed out
        expect(path, key, quantization.get(key), (None, {}, {"format": "dense"}, {"config_groups": {}}))
    return import_eight_bit(path, quantization, stored)


def check_group(path: Path, name: str, group: Any, default_format: Any) -> None:
    """Holds one group of modules against what the eight-bit linear computes.

    Raises:
        ConfigError: it is no group.
        UnsupportedFormatError: the linear computes something else.
    """
    group = _object(path, name, group)
    expect(path, f"{name}.format", group.get("format") or default_format, FORMATS)
    weights = _object(path, f"{name}.weights", group.get("weights"))
    _expect_codes(path, f"{name}.weights", weights, ("int", "float"))
    kind, strategy = weights.get("type", "int"), weights.get("strategy")
    has_blocks = strategy == "block" and kind == "float"
    expect(path, f"{name}.weights.strategy", strategy, ("tensor", "channel", *(["block"] if has_blocks else [])))
    if has_blocks:
        accepted = ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
        expect(path, f"{name}.weights.block_structure", weights.get("block_structure"), accepted)
    expect(path, f"{name}.output_activations", group.get("output_activations"), (None,))
    _check_inputs(path, f"{name}.input_activations", group.get("input_activations"), kind, has_blocks)


def _check_inputs(path: Path, name: str, inputs: Any, kind: str, has_blocks: bool) -> None:
    """Activations as fine as the linear's own or coarser: a scale a token, for blocks a scale a token and 128 columns.

    Static scales and scales of whole tensors are coarser.
    """
    inputs = _object(path, name, inputs)
    _expect_codes(path, name, inputs, (kind,))
    expect(path, f"{name}.dynamic", inputs.get("dynamic", False), (True, False))
    expect(path, f"{name}.strategy", inputs.get("strategy"), ("tensor", "token", *(["group"] if has_blocks else [])))
    if inputs["strategy"] == "group":
        expect(path, f"{name}.group_size", inputs.get("group_size"), (BLOCK,))


def _expect_codes(path: Path, name: str, scheme: dict[str, Any], types: tuple[str, ...]) -> None:
    expect(path, f"{name}.num_bits", scheme.get("num_bits"), (8,))
    expect(path, f"{name}.type", scheme.get("type", "int"), types)
    expect(path, f"{name}.symmetric", scheme.get("symmetric", True), (True,))


def _object(path: Path, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        reason = f"quantization_config: {name} is {value!r}"
        if value is None:
            hint = "supported: eight-bit weights with eight-bit activations"
            raise UnsupportedFormatError(path / "config.json", reason, hint=hint)
        raise ConfigError(path / "config.json", reason, hint="a JSON object is expected")
    return value
