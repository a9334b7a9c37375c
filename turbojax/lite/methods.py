"""The methods: each turns a layer of floats into a layer of codes, with what calibration saw of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from checkpoints import AffineTensor, EightBitTensor
from checkpoints.exporters.layout import AffineScheme, EightBitScheme, Scheme
from turbojax.errors import ConfigError
from turbojax.lite import eight_bit
from turbojax.lite.awq import search_clip, search_scale
from turbojax.lite.eight_bit import EightBits, search_smoothing
from turbojax.lite.floats import FloatLayer, FloatModel, InputGroup
from turbojax.lite.folding import fold, heads_of, stacked
from turbojax.lite.gptq import GptqOptions, gptq
from turbojax.lite.grid import Grid, rounded
from turbojax.lite.statistics import InputStats, relative_error

GROUP_SIZES = (32, 64, 128)
Stats = Mapping[str, InputStats]
Codes = AffineTensor | EightBitTensor


@dataclass(frozen=True)
class LinearReport:
    """One linear: its name, the relative error of its outputs (of its weights where there was no calibration)."""

    name: str
    error: float


@dataclass
class QuantisedLayer:
    """What is written of a layer.

    Attributes:
        codes: the linears by their names.
        others: norms and biases.
        linears: what rounding did to each.
    """

    codes: dict[str, Codes] = field(default_factory=dict)
    others: dict[str, np.ndarray] = field(default_factory=dict)
    linears: list[LinearReport] = field(default_factory=list)

    def add(self, name: str, w: np.ndarray, codes: Codes, gram: np.ndarray | None) -> None:
        """A linear whose weights [N, K] became codes."""
        self.codes[name] = codes
        self.linears.append(LinearReport(name, relative_error(w, floats_of(codes), gram)))

    def add_group(self, layer: FloatLayer, group: InputGroup, codes: AffineTensor, gram: np.ndarray) -> None:
        """The linears of a group, whose weights became codes together."""
        start = 0
        for name in (name.format(i=layer.index) for name in group.tensors):
            w = layer.weights[name]
            self.add(name, w, outputs_of(codes, slice(start, start + len(w))), gram)
            start += len(w)


def outputs_of(codes: AffineTensor, rows: slice) -> AffineTensor:
    """Some outputs of a linear."""
    offset = None if codes.offset is None else codes.offset[:, rows]
    return replace(codes, codes=codes.codes[:, rows], scale=codes.scale[:, rows], offset=offset)


def floats_of(codes: Codes) -> np.ndarray:
    """What codes stand for, [N, K]."""
    return codes.dequantize() if isinstance(codes, EightBitTensor) else np.ascontiguousarray(codes.dequantize().T)


class Method(Protocol):
    """How a layer is rounded. A frozen dataclass: its fields are the settings that a resumed run must share."""

    name: str
    needs_calibration: bool

    @property
    def scheme(self) -> Scheme:
        """Of all linears."""

    def quantise(self, model: FloatModel, layer: FloatLayer, stats: Stats) -> QuantisedLayer:
        """Rounds a layer, whose arrays it may change."""


@dataclass(frozen=True)
class OnGrid:
    """A method whose codes lie on an affine grid.

    Attributes:
        grid: of the codes.

    Raises:
        ConfigError: no layout and no kernel takes the grid.
    """

    grid: Grid
    name = ""  # of the command, which errors name

    def __post_init__(self) -> None:
        grid, owner = self.grid, self.name
        if grid.bits not in (4, 8):
            raise ConfigError(owner, "w_bits", grid.bits, "4 or 8")
        if grid.group_size not in GROUP_SIZES:
            raise ConfigError(owner, "w_group_size", grid.group_size, ", ".join(map(str, GROUP_SIZES)))
        if grid.symmetric and grid.float_offset:
            raise ConfigError(owner, "float_offset", True, "asymmetric codes only, symmetric ones have no offset")

    @property
    def scheme(self) -> AffineScheme:
        return AffineScheme(self.grid.bits, self.grid.group_size, self.grid.symmetric, self.grid.float_offset)


@dataclass(frozen=True)
class Rtn(OnGrid):
    """Every weight to its nearest code."""

    name = "rtn"
    needs_calibration = False

    def quantise(self, model: FloatModel, layer: FloatLayer, stats: Stats) -> QuantisedLayer:
        out = QuantisedLayer()
        for name, w in layer.weights.items():
            out.add(name, w, rounded(w, self.grid), None)
        return out


@dataclass(frozen=True)
class Awq(OnGrid):
    """Scales that calibration finds, folded into what makes the inputs; then ranges clipped, then nearest codes.

    Attributes:
        search_scale: look for scales.
        search_clip: look for ranges.
    """

    search_scale: bool = True
    search_clip: bool = True
    name = "auto_awq"
    needs_calibration = True

    def quantise(self, model: FloatModel, layer: FloatLayer, stats: Stats) -> QuantisedLayer:
        out, scaled = QuantisedLayer(), dict(stats)
        if self.search_scale:
            for group in model.groups:
                w, heads = stacked(layer, group), heads_of(model, group)
                scale = search_scale(w, stats[group.name], self.grid, heads)
                fold(model, layer, group, scale)
                scaled[group.name] = stats[group.name].scaled(scale)
        for group in model.groups:
            w, gram = stacked(layer, group), scaled[group.name].gram
            shrink = search_clip(w, gram, self.grid) if self.search_clip else 1.0
            out.add_group(layer, group, rounded(w, self.grid, shrink), gram)
        return replace(out, others=layer.others)


@dataclass(frozen=True)
class Gptq(OnGrid):
    """Errors are made up for by the weights that are not rounded yet; see `gptq`."""

    options: GptqOptions = field(default_factory=GptqOptions)
    name = "auto_gptq"
    needs_calibration = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.options.damping <= 1:
            raise ConfigError(self.name, "damping", self.options.damping, "a share above 0, up to 1")

    @property
    def scheme(self) -> AffineScheme:
        own_order = self.options.act_order and not self.options.static_groups
        return replace(super().scheme, act_order=own_order)

    def quantise(self, model: FloatModel, layer: FloatLayer, stats: Stats) -> QuantisedLayer:
        out = QuantisedLayer()
        for group in model.groups:
            gram = stats[group.name].gram
            out.add_group(layer, group, gptq(stacked(layer, group), gram, self.grid, self.options), gram)
        return out


@dataclass(frozen=True)
class SmoothQuant:
    """Eight bits for weights and inputs, with factors that share what is hard to round between the two."""

    dtype: EightBits = "int8"
    name = "smooth_quant"
    needs_calibration = True

    def __post_init__(self) -> None:
        if self.dtype not in eight_bit.LARGEST:
            raise ConfigError(self.name, "quant_dtype", self.dtype, "int8 or fp8")

    @property
    def scheme(self) -> Scheme:
        return EightBitScheme(self.dtype)

    def quantise(self, model: FloatModel, layer: FloatLayer, stats: Stats) -> QuantisedLayer:
        out, scaled = QuantisedLayer(), {}
        for group in model.groups:
            scale = search_smoothing(stacked(layer, group), stats[group.name], self.dtype, heads_of(model, group))
            fold(model, layer, group, scale)
            scaled[group.name] = stats[group.name].scaled(scale)
        for group in model.groups:
            for name in (name.format(i=layer.index) for name in group.tensors):
                w = layer.weights[name]
                out.add(name, w, eight_bit.rounded_channels(w, self.dtype), scaled[group.name].gram)
        return replace(out, others=layer.others)


@dataclass(frozen=True)
class Fp8:
    """Weights to e4m3, with a scale for each output or for each block of 128 x 128; inputs as they come."""

    has_blocks: bool = False
    name = "fp8"
    needs_calibration = False

    @property
    def scheme(self) -> Scheme:
        return EightBitScheme("float8_e4m3fn", self.has_blocks)

    def quantise(self, model: FloatModel, layer: FloatLayer, stats: Stats) -> QuantisedLayer:
        out = QuantisedLayer()
        for name, w in layer.weights.items():
            codes = eight_bit.rounded_blocks(w) if self.has_blocks else eight_bit.rounded_channels(w, "float8_e4m3fn")
            out.add(name, w, codes, None)
        return out
