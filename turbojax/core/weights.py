"""The parameters of a model as one pytree, cut into segments and stacked over their layers."""

from __future__ import annotations

import jax
from flax import struct

from pallas_kernels.affine_linear import AffineWeights, PackedAffine
from pallas_kernels.eight_bit_linear import EightBitWeights
from turbojax.models.spec import ModelSpec


@struct.dataclass
class Linear:
    """y = x @ W (+ bias), stacked over layers.

    Attributes:
        weight: dense [L, N, K] in the model's dtype (K contiguous, as checkpoints store it); grouped affine codes,
            packed or as they are; or eight-bit codes, which take x in eight bits too.
        bias: [L, N] | None.
    """

    weight: jax.Array | AffineWeights | PackedAffine | EightBitWeights
    bias: jax.Array | None = None


@struct.dataclass
class LayerWeights:
    """The layers of one segment; every array has a leading layer axis L. See `LayerSpec` for the linears.

    `k_scale` [L, K, H] goes with `LayerSpec.k_hadamard`, see `rope_write`.
    """

    attn_norm: jax.Array
    qkv: tuple[Linear, ...]
    q_norm: jax.Array | None
    k_norm: jax.Array | None
    o: Linear
    post_attn_norm: jax.Array | None
    ffw_norm: jax.Array
    gate_up: tuple[Linear, ...]
    down: Linear
    post_ffw_norm: jax.Array | None
    k_scale: jax.Array | None = None


@struct.dataclass
class Weights:
    """A model's parameters together with what they are.

    Attributes:
        embedding: the [V, D] table, as a linear of one layer.
        segments: the decoder layers.
        final_norm: [1, D].
        head: the output projection; None: the embedding's (tied).
        spec: static; keys the compiled steps.
    """

    embedding: Linear
    segments: tuple[LayerWeights, ...]
    final_norm: jax.Array
    head: Linear | None
    spec: ModelSpec = struct.field(pytree_node=False)
