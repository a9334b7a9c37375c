"""From an architecture and a checkpoint to a ModelSpec: checks every tensor, cuts the layers into segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from checkpoints import AffineFormat, Checkpoint, MissingTensorError, ShapeMismatchError, TensorInfo
from turbojax.models.families import Architecture, Source
from turbojax.models.spec import LayerSpec, LinearSpec, ModelSpec, SegmentSpec

KVBits = tuple[int, int]


def tensor_at(checkpoint: Checkpoint, name: str) -> TensorInfo:
    """The header entry of a tensor that the model needs.

    Raises:
        MissingTensorError: the checkpoint lacks it.
    """
    info = checkpoint.tensors.get(name)
    if info is None:
        raise MissingTensorError(checkpoint.path, name)
    return info


def check_shape(checkpoint: Checkpoint, source: Source, layer: int, shape: tuple[int, ...]) -> TensorInfo:
    """Compares one source with the shape the config implies; a source of picked rows must be large enough."""
    info = tensor_at(checkpoint, source.at(layer))
    got = tuple(info.shape)
    if source.rows is not None and got:
        shape = (max(got[0], max(source.rows) + 1), *shape[1:])
    if got != shape:
        raise ShapeMismatchError(info.file, info.name, found=got, expected=shape)
    return info


def bias_of(source: Source) -> Source:
    return Source(source.name.removesuffix(".weight") + ".bias", source.rows)


def linear_spec(checkpoint: Checkpoint, arch: Architecture, part: str, layer: int) -> LinearSpec:
    """The spec of one part as the checkpoint stores it."""
    source = arch.sources[part]
    in_dim, out_dim = arch.in_dims.get(part, arch.embed_dim), arch.out_dims[part]
    form = check_shape(checkpoint, source, layer, (out_dim, in_dim)).format
    if part in arch.biased:
        check_shape(checkpoint, bias_of(source), layer, (out_dim,))
    if not isinstance(form, AffineFormat):
        return LinearSpec(in_dim, out_dim, has_bias=part in arch.biased)
    return LinearSpec(
        in_dim, out_dim, form.bits, form.group_size, form.has_offset, form.has_perm, has_bias=part in arch.biased
    )


def fused(parts: Sequence[LinearSpec]) -> tuple[LinearSpec, ...]:
    """One linear in place of several that share input and format; else (or with permuted rows) they stay apart."""
    first = parts[0]
    formats = {(p.in_dim, p.bits, p.group_size, p.has_offset, p.has_perm, p.has_bias) for p in parts}
    if len(formats) > 1 or first.has_perm:
        return tuple(parts)
    return (
        LinearSpec(
            first.in_dim, sum(p.out_dim for p in parts), first.bits, first.group_size,
            first.has_offset, has_bias=first.has_bias,
        ),
    )  # fmt: skip


def layer_spec(checkpoint: Checkpoint, arch: Architecture, layer: int, kv_bits: KVBits) -> LayerSpec:
    """The static spec of one layer; every tensor of it is there and has the right shape."""
    norms = ["attn_norm", "ffw_norm"] + (["post_attn_norm", "post_ffw_norm"] if arch.has_post_norms else [])
    for norm in norms:
        check_shape(checkpoint, arch.sources[norm], layer, (arch.embed_dim,))
    for norm in ("q_norm", "k_norm") if arch.has_qk_norm else ():
        check_shape(checkpoint, arch.sources[norm], layer, (arch.head_dim,))
    part = {name: linear_spec(checkpoint, arch, name, layer) for name in ("q", "k", "v", "o", "gate", "up", "down")}
    return LayerSpec(
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        attn_scale=arch.attn_scale,
        window=arch.windows[layer],
        attn_softcap=arch.attn_softcap,
        has_qk_norm=arch.has_qk_norm,
        has_post_norms=arch.has_post_norms,
        activation=arch.activation,
        rope=arch.rope,
        qkv=fused([part["q"], part["k"], part["v"]]),
        o=part["o"],
        gate_up=fused([part["gate"], part["up"]]),
        down=part["down"],
        k_bits=kv_bits[0],
        v_bits=kv_bits[1],
    )


def table_spec(checkpoint: Checkpoint, arch: Architecture, part: str) -> LinearSpec:
    """The spec of the embedding or the head, [V, D]."""
    form = check_shape(checkpoint, arch.sources[part], 0, (arch.vocab_size, arch.embed_dim)).format
    if not isinstance(form, AffineFormat):
        return LinearSpec(arch.embed_dim, arch.vocab_size)
    return LinearSpec(arch.embed_dim, arch.vocab_size, form.bits, form.group_size, form.has_offset, form.has_perm)


def plan_model(checkpoint: Checkpoint, arch: Architecture, dtype: str, kv_bits: Callable[[int], KVBits]) -> ModelSpec:
    """Checks a checkpoint against an architecture, from headers alone, and cuts its layers into segments.

    Args:
        checkpoint: the open checkpoint.
        arch: its architecture.
        dtype: of activations and dense weights.
        kv_bits: layer -> (bits of K, bits of V) of the KV cache.

    Raises:
        MissingTensorError, ShapeMismatchError: naming file, tensor, what came and what the config implies.
    """
    layers = [layer_spec(checkpoint, arch, i, kv_bits(i)) for i in range(arch.num_layers)]
    segments, first = [], 0
    for layer, run in groupby(layers):
        num_layers = len(list(run))
        segments.append(SegmentSpec(layer, first, num_layers))
        first += num_layers
    check_shape(checkpoint, arch.sources["final_norm"], 0, (arch.embed_dim,))
    embedding = table_spec(checkpoint, arch, "embedding")
    return ModelSpec(
        architecture=arch.name,
        vocab_size=arch.vocab_size,
        embed_dim=arch.embed_dim,
        segments=tuple(segments),
        norm_eps=arch.norm_eps,
        norm_offset=arch.norm_offset,
        embed_scale=arch.embed_scale,
        embedding=embedding,
        head=None if arch.tied else table_spec(checkpoint, arch, "head"),
        logit_softcap=arch.logit_softcap,
        max_len=arch.max_len,
        dtype=dtype,
    )
