"""A model's weights as floats, one layer at a time: what calibration runs and what the methods round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import AffineTensor, EightBitTensor, open_checkpoint
from turbojax.core.weights import LayerWeights, Linear
from turbojax.models.families import Architecture, architecture_of
from turbojax.models.loading import cast, pick
from turbojax.models.planning import bias_of, plan_model
from turbojax.models.spec import LayerSpec, LinearSpec

LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class InputGroup:
    """Linears that read the same input.

    Attributes:
        name: "qkv" | "o" | "gate_up" | "down".
        parts: of the layer.
        tensors: the checkpoint's names of their weights, `{i}` for the layer; fewer than parts where it fuses them.
        before: the part whose output this input is, up to a function that leaves factors be: a norm or a linear.
    """

    name: str
    parts: tuple[str, ...]
    tensors: tuple[str, ...]
    before: str


def input_groups(arch: Architecture) -> tuple[InputGroup, ...]:
    """The four inputs of a layer's linears."""

    def group(name: str, parts: tuple[str, ...], before: str) -> InputGroup:
        return InputGroup(name, parts, tuple(dict.fromkeys(arch.sources[p].name for p in parts)), before)

    return (
        group("qkv", ("q", "k", "v"), "attn_norm"),
        group("o", ("o",), "v"),
        group("gate_up", ("gate", "up"), "ffw_norm"),
        group("down", ("down",), "up"),
    )


@dataclass
class FloatLayer:
    """One layer's parameters by their names in the checkpoint, float32 on the host.

    Attributes:
        index: of the layer.
        weights: [N, K] each.
        others: norms and biases.
    """

    index: int
    weights: dict[str, np.ndarray]
    others: dict[str, np.ndarray] = field(default_factory=dict)


class FloatModel:
    """A checkpoint opened for calibration; every tensor's shape is checked against its config before any is read.

    Attributes:
        checkpoint, arch: what was opened, and what it describes.
        groups: see `input_groups`.
    """

    def __init__(self, path: Path, model_format: str | None = None) -> None:
        self.checkpoint = open_checkpoint(path, model_format)
        self.arch = architecture_of(self.checkpoint.config)
        self.spec = plan_model(self.checkpoint, self.arch, "float32", lambda layer: (16, 16))
        self.checkpoint.check()
        self.groups = input_groups(self.arch)

    @property
    def num_layers(self) -> int:
        return self.arch.num_layers

    def read(self, name: str) -> np.ndarray:
        """A tensor as float32, [N, K] for a linear, whatever it is stored as."""
        tensor = self.checkpoint.read(name)
        if isinstance(tensor, AffineTensor):
            return np.ascontiguousarray(tensor.dequantize().T)
        if isinstance(tensor, EightBitTensor):
            return tensor.dequantize()
        values = np.ascontiguousarray(cast(tensor, F32))
        return values if values.flags.writeable else values.copy()

    def weight_names(self, layer: int) -> list[str]:
        """The linears of a layer."""
        return [name.format(i=layer) for group in self.groups for name in group.tensors]

    def layer(self, layer: int) -> FloatLayer:
        """Reads one layer."""
        sources = self.arch.sources
        others = {s.at(layer) for part, s in sources.items() if part.endswith("norm") and "{i}" in s.name}
        others |= {bias_of(sources[part]).at(layer) for part in self.arch.biased}
        others &= self.checkpoint.tensors.keys()
        weights = {name: self.read(name) for name in self.weight_names(layer)}
        return FloatLayer(layer, weights, {name: self.read(name) for name in sorted(others)})

    def embed(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [..., D]: the stream before the first layer."""
        table = self.read(self.arch.sources["embedding"].name)
        return table[token_ids] * F32.type(self.arch.embed_scale)

    def layer_spec(self, layer: int) -> LayerSpec:
        """The layer with dense linears, none of them fused."""
        segment = next(s for s in reversed(self.spec.segments) if s.first_layer <= layer)
        arch = self.arch

        def dense(part: str) -> LinearSpec:
            in_dim = arch.in_dims.get(part, arch.embed_dim)
            return LinearSpec(in_dim, arch.out_dims[part], has_bias=part in arch.biased)

        return replace(
            segment.layer, qkv=tuple(dense(p) for p in "qkv"), o=dense("o"),
            gate_up=(dense("gate"), dense("up")), down=dense("down"),
        )  # fmt: skip


def layer_weights(model: FloatModel, layer: FloatLayer) -> LayerWeights:
    """The layer as the decoder takes it: stacks of one, linears apart."""
    arch, spec = model.arch, model.layer_spec(layer.index)

    def array(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x[None])

    def linear(part: str) -> Linear:
        source = arch.sources[part]
        bias = array(pick(layer.others[bias_of(source).at(layer.index)], source.rows)) if part in arch.biased else None
        return Linear(array(pick(layer.weights[source.at(layer.index)], source.rows)), bias)

    def linears(parts: Sequence[str]) -> tuple[Linear, ...]:
        return tuple(linear(part) for part in parts)

    def norm(part: str, exists: bool = True) -> jax.Array | None:
        return array(layer.others[arch.sources[part].at(layer.index)]) if exists else None

    attn_norm, ffw_norm = norm("attn_norm"), norm("ffw_norm")
    assert attn_norm is not None
    assert ffw_norm is not None
    return LayerWeights(
        attn_norm=attn_norm,
        qkv=linears("qkv"),
        q_norm=norm("q_norm", spec.has_qk_norm),
        k_norm=norm("k_norm", spec.has_qk_norm),
        o=linear("o"),
        post_attn_norm=norm("post_attn_norm", spec.has_post_norms),
        ffw_norm=ffw_norm,
        gate_up=linears(("gate", "up")),
        down=linear("down"),
        post_ffw_norm=norm("post_ffw_norm", spec.has_post_norms),
    )
