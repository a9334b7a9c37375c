"""Models of a named shape with random weights, made on the device in the form that loading would give them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from checkpoints import AffineFormat, Checkpoint, DenseFormat, EightBitFormat, TensorFormat, TensorInfo
from checkpoints.tensors import LogicalTensor
from pallas_kernels import backend
from pallas_kernels.affine_linear import AffineWeights, pack, packing_problem
from pallas_kernels.eight_bit_linear import EightBitWeights
from turbojax.core.weights import Linear, Weights
from turbojax.errors import ModelConfigError
from turbojax.models.abstract import abstract_weights
from turbojax.models.cutting import ModelCut
from turbojax.models.families import Architecture, architecture_of
from turbojax.models.model import Model, resolve_dtype
from turbojax.models.planning import KVBits, plan_model
from turbojax.models.shapes import shape_config
from turbojax.sharding import HERE, Placement

LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
WEIGHT_FORMATS: Mapping[str, TensorFormat] = {
    "w4": AffineFormat(bits=4, group_size=128, has_offset=False),  # as GPTQ quantises, symmetric
    "w4-awq": AffineFormat(bits=4, group_size=128, has_offset=True),  # with zero points
    "w8": AffineFormat(bits=8, group_size=128, has_offset=False),
    "w8a8": EightBitFormat("int8"),  # a scale a channel
    "fp8": EightBitFormat("float8_e4m3fn"),
    "fp8-block": EightBitFormat("float8_e4m3fn", has_blocks=True),  # as DeepSeek and Qwen quantise
    "bf16": DenseFormat("bfloat16"),  # dense in the dtype of the activations
}
# Standard deviations of random codes around their zero point: what scales are divided by.
CODE_STD = {4: 4.63, 8: 73.9}
EIGHT_BIT_STD = {"int8": 73.9, "float8_e4m3fn": 107.2}


def random_model(
    shape: str,
    weight_format: str = "w4",
    dtype: str = "auto",
    kv_bits: KVBits | Callable[[int], KVBits] = (16, 16),
    *,
    kv_hadamard: bool = False,
    seed: int = 0,
    placement: Placement = HERE,
) -> Model:
    """A model of a named shape whose random weights keep activations at their ordinary size.

    Weights are made on their devices, a layer at a time, so memory stays at the result plus one layer. On a GPU
    affine codes come packed, as the kernels read them; embedding and head are dense.

    Args:
        shape: a name in `shapes.SHAPES`.
        weight_format: a name in `WEIGHT_FORMATS`, of all linears of the layers.
        dtype: see `load_model`.
        kv_bits: bits of K and of V in the KV cache, for all layers or as a function of the layer.
        kv_hadamard: see `EngineConfig`.
        seed: of the weights; each shard has its own.
        placement: devices that the model is cut between.

    Raises:
        UnknownShapeError, ModelConfigError: an argument names nothing that exists.
    """
    if weight_format not in WEIGHT_FORMATS:
        raise ModelConfigError(f"weight format '{weight_format}' is unknown; known are " + ", ".join(WEIGHT_FORMATS))
    config = dict(shape_config(shape))
    arch = architecture_of(config)
    checkpoint = described_checkpoint(shape, config, arch, WEIGHT_FORMATS[weight_format])
    bits = kv_bits if callable(kv_bits) else lambda layer: kv_bits
    spec = plan_model(checkpoint, arch, resolve_dtype(dtype, config), bits, kv_hadamard)
    if placement.num_shards > 1:
        spec = ModelCut.of(spec, placement.num_shards).shard_spec()
    shards = []
    for number, device in enumerate(placement.devices):
        with jax.default_device(device):
            shards.append(random_weights(abstract_weights(spec), seed + number))
    return Model(Path(shape), spec, placement.join(shards), config, {}, placement)


def described_checkpoint(name: str, config: dict[str, Any], arch: Architecture, form: TensorFormat) -> Checkpoint:
    """The headers of a checkpoint whose linears have this format; there are no data behind them."""
    dense = DenseFormat("bfloat16")
    tensors: list[LogicalTensor] = []

    def no_data() -> np.ndarray:
        raise AssertionError("a shape has no data to read")

    def add(tensor: str, shape: tuple[int, ...], form: TensorFormat) -> None:
        tensors.append(LogicalTensor(TensorInfo(tensor, shape, form, Path(name), num_bytes=0), no_data))

    for part, source in arch.sources.items():
        assert source.rows is None, "named shapes have a tensor of their own for every part"
        for layer in range(arch.num_layers if "{i}" in source.name else 1):
            tensor = source.at(layer)
            if part in LINEARS:
                add(tensor, (arch.out_dims[part], arch.in_dims.get(part, arch.embed_dim)), form)
                add(tensor.removesuffix(".weight") + ".bias", (arch.out_dims[part],), dense)
            elif part in ("embedding", "head"):
                add(tensor, (arch.vocab_size, arch.embed_dim), dense)
            else:
                add(tensor, (arch.head_dim if part in ("q_norm", "k_norm") else arch.embed_dim,), dense)
    return Checkpoint(Path(name), config, {}, tensors)


def random_weights(abstract: Weights, seed: int) -> Weights:
    """Values for an abstract tree: norms are 1, biases small, linears keep the size of what they multiply.

    Args:
        abstract: the tree, of `abstract_weights`.
        seed: of all of it; every part has its own stream, named by its place in the tree.
    """
    root = jax.random.key(seed, impl="rbg")  # the device's own generator: gigabytes in milliseconds

    def make(path: Any, part: Any) -> Any:
        key = jax.random.fold_in(root, zlib.crc32(jax.tree_util.keystr(path).encode()))
        if isinstance(part, Linear):
            return random_linear(key, part)
        return jnp.ones(part.shape, part.dtype)

    return jax.tree_util.tree_map_with_path(make, abstract, is_leaf=lambda part: isinstance(part, Linear))


def random_linear(key: jax.Array, abstract: Linear) -> Linear:
    """A linear like the abstract one, packed where kernels will read it."""
    bias: Any = abstract.bias
    if bias is not None:
        bias = fill_layers(jax.random.fold_in(key, 1), bias, -0.02, 0.02)
    return Linear(random_weight(key, abstract.weight), bias)


def random_weight(key: jax.Array, form: Any) -> Any:
    """Values of standard deviation 1 / sqrt(K), of the abstract weight's kind."""
    if isinstance(form, AffineWeights):
        return random_codes(key, form)
    if isinstance(form, EightBitWeights):
        return random_eight_bit(key, form)
    bound = (3 / form.shape[2]) ** 0.5  # uniform numbers
    return fill_layers(key, form, -bound, bound)


def random_codes(key: jax.Array, abstract: AffineWeights) -> Any:
    """Affine codes with values of standard deviation 1 / sqrt(K), in the form that this device's kernels read."""
    num_codes, scale = 2**abstract.bits, abstract.K**-0.5 / CODE_STD[abstract.bits]
    form = packed_form(abstract) if backend.on_gpu() and packing_problem(abstract) is None else abstract
    filled: dict[str, jax.Array] = {}
    for i, field in enumerate(fields(form)):
        leaf, at = getattr(form, field.name), jax.random.fold_in(key, i)
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            continue
        if field.name == "scale":
            filled["scale"] = fill_layers(at, leaf, 0.5 * scale, 1.5 * scale)
        elif field.name == "offset":
            filled["offset"] = filled["scale"] * np.array(-num_codes // 2, leaf.dtype)
        elif field.name == "shift":  # zero points
            filled["shift"] = jnp.full(leaf.shape, num_codes // 2, leaf.dtype)
        else:
            filled[field.name] = fill_layers(at, leaf, num_codes=num_codes)
    return replace(form, **filled)


def random_eight_bit(key: jax.Array, abstract: EightBitWeights) -> EightBitWeights:
    """Eight-bit codes with values of standard deviation 1 / sqrt(K)."""
    leaves: Any = abstract
    scale = abstract.K**-0.5 / EIGHT_BIT_STD[str(abstract.codes.dtype)]
    codes = fill_layers(key, leaves.codes)
    return EightBitWeights(codes, fill_layers(jax.random.fold_in(key, 1), leaves.scale, 0.9 * scale, 1.1 * scale))


def packed_form(abstract: AffineWeights) -> Any:
    """What `pack` makes of such weights, without values."""
    num_layers = abstract.codes.shape[0]
    one = _packed_layer(abstract.K, abstract.N, abstract.bits, abstract.group_size, abstract.offset is not None)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_layers, *leaf.shape[1:]), leaf.dtype), one)


@lru_cache
def _packed_layer(K: int, N: int, bits: int, group_size: int, has_offset: bool) -> Any:
    """One packed layer without values: found by packing zeros, so that it is right whatever `pack` does."""
    groups = (1, N, -(-K // group_size))
    scale: Any = np.ones(groups, np.float16)  # the dtype in which checkpoints store it
    offset: Any = np.full(groups, -(2.0 ** (bits - 1)), np.float16) if has_offset else None
    codes: Any = np.broadcast_to(np.uint8(0), (1, N, K))
    packed = pack(AffineWeights(codes, scale, offset, bits=bits, group_size=group_size))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), packed)


def fill_layers(
    key: jax.Array, leaf: jax.ShapeDtypeStruct, low: float = 0.0, high: float = 1.0, *, num_codes: int = 256
) -> jax.Array:
    """Random values for a leaf [L, ...]: floats uniform in low .. high, bytes 0 .. num_codes - 1, any wider words.

    Eight-bit codes: any int8, any number of float8_e4m3fn.
    """
    bounds = np.array([low, high], np.float32)
    return _fill_layers(key, bounds, shape=leaf.shape, dtype=jnp.dtype(leaf.dtype), num_codes=num_codes)


@partial(jax.jit, static_argnames=("shape", "dtype", "num_codes"))
def _fill_layers(
    key: jax.Array, bounds: jax.Array, *, shape: tuple[int, ...], dtype: np.dtype, num_codes: int
) -> jax.Array:
    """See `fill_layers`; drawn in a loop over the layers, whose temporaries are one layer's."""

    def layer(i: jax.Array) -> jax.Array:
        at = jax.random.fold_in(key, i)
        if jnp.issubdtype(dtype, jnp.unsignedinteger):
            bits = jax.random.bits(at, shape[1:], dtype)
            return bits & dtype.type(num_codes - 1) if dtype.itemsize == 1 else bits
        if dtype.itemsize == 1:
            codes = jax.random.bits(at, shape[1:], jnp.uint8)
            nan = (codes & 0x7F) == 0x7F  # of e4m3; 127 and -1 of int8 go with it
            return lax.bitcast_convert_type(jnp.where(nan, codes ^ 1, codes), dtype)
        low, high = bounds.astype(dtype)
        return jax.random.uniform(at, shape[1:], dtype, low, high)

    return lax.map(layer, jnp.arange(shape[0]))
