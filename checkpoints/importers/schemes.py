"""The `config_groups` of compressed-tensors: which modules are quantised how, held against what can be computed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.eight_bit import BLOCK
from checkpoints.errors import ConfigError, UnsupportedFormatError
from checkpoints.importers.settings import expect, group_size_setting

PACKED, PLAIN = "pack-quantized", ("int-quantized", "float-quantized", "naive-quantized")
PATTERN = "re:"


@dataclass(frozen=True)
class Scheme:
    """How one group of modules is quantised.

    Attributes:
        targets: names, patterns ("re:...") or classes of modules.
        is_float: the codes are e4m3, else integers.
        bits: of a code.
        group_size: rows of K under one scale; None: a scale a channel, matrix or block.
        symmetric: there are no zero points.
        has_activations: activations are quantised too.
    """

    targets: tuple[str, ...]
    is_float: bool
    bits: int
    group_size: int | None
    symmetric: bool
    has_activations: bool

    @property
    def is_eight_bit(self) -> bool:
        """Whether the eight-bit linear computes it: codes and activations of eight bits, no groups, no zero points."""
        return self.has_activations and self.bits == 8 and self.symmetric and self.group_size is None


def schemes_of(path: Path, quantization: dict[str, Any]) -> list[Scheme]:
    """All groups of a config.

    Raises:
        ConfigError: there is none, or one is no group.
        UnsupportedFormatError: one asks for something else than what is computed.
    """
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        reason = f"quantization_config: config_groups is {groups!r}"
        raise ConfigError(path / "config.json", reason, hint="a JSON object with a group at least is expected")
    default = quantization.get("format")
    return [_scheme(path, f"config_groups.{name}", group, default) for name, group in groups.items()]


def scheme_for(path: Path, schemes: Sequence[Scheme], module: str) -> Scheme:
    """The scheme of a module: by its name before its class, which for all that is quantised here is Linear.

    Raises:
        ConfigError: no group of several has it.
    """

    def names(target: str) -> bool:
        if target.startswith(PATTERN):
            return re.match(target.removeprefix(PATTERN), module) is not None
        return target == module

    for matches in (names, lambda target: target == "Linear"):
        for scheme in schemes:
            if any(matches(target) for target in scheme.targets):
                return scheme
    if len(schemes) == 1:
        return schemes[0]
    reason = "is quantised, and no group of quantization_config.config_groups has it"
    raise ConfigError(path / "config.json", reason, tensor=module, hint="add it to the targets of its group")


def _scheme(path: Path, name: str, group: Any, default_format: Any) -> Scheme:
    group = _object(path, name, group)
    form = group.get("format") or default_format
    expect(path, f"{name}.format", form, (PACKED, *PLAIN))
    weights = _object(path, f"{name}.weights", group.get("weights"))
    kind = weights.get("type", "int")
    expect(path, f"{name}.weights.type", kind, ("int",) if form == PACKED else ("int", "float"))
    expect(path, f"{name}.weights.num_bits", weights.get("num_bits"), range(2, 9) if form == PACKED else (8,))
    symmetric = weights.get("symmetric", True)
    expect(path, f"{name}.weights.symmetric", symmetric, (True, False) if kind == "int" else (True,))
    size = _group_size(path, f"{name}.weights", weights, kind)
    expect(path, f"{name}.output_activations", group.get("output_activations"), (None,))
    targets = group.get("targets") or ["Linear"]
    inputs = group.get("input_activations")
    scheme = Scheme(tuple(targets), kind == "float", weights["num_bits"], size, symmetric, inputs is not None)
    if scheme.is_eight_bit:
        has_blocks = weights.get("strategy") == "block"
        _check_inputs(path, f"{name}.input_activations", inputs, kind, has_blocks)
    return scheme


def _group_size(path: Path, name: str, weights: dict[str, Any], kind: str) -> int | None:
    """Rows of K under one scale; None where the strategy has no groups."""
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    expect(path, f"{name}.strategy", strategy, ("tensor", "channel", "group" if kind == "int" else "block"))
    if strategy == "block":
        accepted = ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
        expect(path, f"{name}.block_structure", weights.get("block_structure"), accepted)
    if strategy != "group":
        return None
    size = group_size_setting(path, weights, "group_size")
    if size is None:
        reason = f"quantization_config: {name} has strategy 'group' and no group_size"
        raise ConfigError(path / "config.json", reason, hint="add it")
    return size


def _check_inputs(path: Path, name: str, inputs: Any, kind: str, has_blocks: bool) -> None:
    """Activations as fine as the linear's own or coarser: a scale a token, for blocks a scale a token and 128 columns.

    Static scales and scales of whole tensors are coarser.
    """
    inputs = _object(path, name, inputs)
    expect(path, f"{name}.num_bits", inputs.get("num_bits"), (8,))
    expect(path, f"{name}.type", inputs.get("type", "int"), (kind,))
    expect(path, f"{name}.symmetric", inputs.get("symmetric", True), (True,))
    expect(path, f"{name}.dynamic", inputs.get("dynamic", False), (True, False))
    expect(path, f"{name}.strategy", inputs.get("strategy"), ("tensor", "token", *(["group"] if has_blocks else [])))
    if inputs["strategy"] == "group":
        expect(path, f"{name}.group_size", inputs.get("group_size"), (BLOCK,))


def _object(path: Path, name: str, value: Any) -> dict[str, Any]:
    if value is None:
        reason = f"quantization_config: {name} is None"
        hint = "supported: quantised weights, with or without quantised activations"
        raise UnsupportedFormatError(path / "config.json", reason, hint=hint)
    if not isinstance(value, dict):
        reason = f"quantization_config: {name} is {value!r}"
        raise ConfigError(path / "config.json", reason, hint="a JSON object is expected")
    return value
