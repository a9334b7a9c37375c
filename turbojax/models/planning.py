"""From an architecture and a checkpoint to a ModelSpec: checks every tensor, cuts the layers into segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from checkpoints import (
    AffineFormat,
    Checkpoint,
    EightBitFormat,
    MissingTensorError,
    ShapeMismatchError,
    TensorInfo,
    UnsupportedFormatError,
)
from checkpoints.eight_bit import BLOCK
from turbojax.models.families import Architecture, Source
from turbojax.models.spec import (
    Dense,
    EightBit,
    GroupedAffine,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    SegmentSpec,
    Storage,
    gate_up_tile,
)

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


def storage_of(info: TensorInfo) -> Storage:
    """What a weight stays stored as, from the format in its checkpoint."""
    form = info.format
    if isinstance(form, AffineFormat):
        return GroupedAffine(form.bits, form.group_size, form.has_offset, form.has_perm)
    if isinstance(form, EightBitFormat):
        has_blocks = form.has_blocks and info.shape[1] > BLOCK  # one block along K: a scale a channel
        return EightBit("int8" if form.dtype == "int8" else "float8_e4m3fn", has_blocks)
    return Dense()


def blocks_of_rows(rows: Sequence[int]) -> tuple[int, ...] | None:
    """The blocks of 128 rows that these rows consist of (the last may be cut off); None where they cut one apart."""
    starts = rows[::BLOCK]
    whole = [row for start in starts for row in range(start, start + BLOCK)][: len(rows)]
    is_whole = all(start % BLOCK == 0 for start in starts) and list(rows) == whole
    return tuple(start // BLOCK for start in starts) if is_whole else None


def linear_spec(checkpoint: Checkpoint, arch: Architecture, part: str, layer: int) -> LinearSpec:
    """The spec of one part as the checkpoint stores it."""
    source, has_bias = arch.sources[part], part in arch.biased
    in_dim, out_dim = arch.in_dims.get(part, arch.embed_dim), arch.out_dims[part]
    info = check_shape(checkpoint, source, layer, (out_dim, in_dim))
    if has_bias:
        check_shape(checkpoint, bias_of(source), layer, (out_dim,))
    storage = storage_of(info)
    if storage == EightBit("float8_e4m3fn", has_blocks=True) and source.rows and blocks_of_rows(source.rows) is None:
        reason = f"has scales for blocks of {BLOCK} rows, and the rows of part {part!r} cut blocks apart"
        raise UnsupportedFormatError(info.file, reason, tensor=info.name, hint="quantise it with a scale a channel")
    return LinearSpec(in_dim, out_dim, storage, has_bias)


def fused(parts: Sequence[LinearSpec], run_len: int) -> tuple[LinearSpec, ...]:
    """One linear in place of several that share input and storage; else they stay apart.

    So do parts with permuted rows, and those whose blocks of scales would mix.

    Args:
        parts: the linears.
        run_len: rows of one part that stay together in the fused one.
    """
    first = parts[0]
    storage = first.storage
    if any((p.in_dim, p.storage, p.has_bias) != (first.in_dim, storage, first.has_bias) for p in parts):
        return tuple(parts)
    if isinstance(storage, GroupedAffine) and storage.has_perm:
        return tuple(parts)
    if isinstance(storage, EightBit) and storage.has_blocks and run_len % BLOCK:
        return tuple(parts)
    return (LinearSpec(first.in_dim, sum(p.out_dim for p in parts), storage, first.has_bias),)


def has_hadamard(kv_bits: KVBits, wanted: bool) -> bool:
    """Whether a layer multiplies q and k by a Hadamard matrix: where that is wanted, and K has 4 bits.

    With 8 bits K costs less than the rounding of bfloat16 does.
    """
    return wanted and kv_bits[0] == 4


def layer_spec(checkpoint: Checkpoint, arch: Architecture, layer: int, kv_bits: KVBits, kv_hadamard: bool) -> LayerSpec:
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
        qkv=fused([part["q"], part["k"], part["v"]], arch.head_dim),
        o=part["o"],
        gate_up=fused([part["gate"], part["up"]], gate_up_tile(arch.ffw_dim)),
        down=part["down"],
        k_bits=kv_bits[0],
        v_bits=kv_bits[1],
        k_hadamard=has_hadamard(kv_bits, kv_hadamard),
    )


def table_spec(checkpoint: Checkpoint, arch: Architecture, part: str) -> LinearSpec:
    """The spec of the embedding or the head, [V, D]; an embedding's rows are looked up dense or in affine codes."""
    storage = storage_of(check_shape(checkpoint, arch.sources[part], 0, (arch.vocab_size, arch.embed_dim)))
    if part == "embedding" and isinstance(storage, EightBit):
        storage = Dense()
    return LinearSpec(arch.embed_dim, arch.vocab_size, storage)


def plan_model(
    checkpoint: Checkpoint,
    arch: Architecture,
    dtype: str,
    kv_bits: Callable[[int], KVBits],
    kv_hadamard: bool = False,
) -> ModelSpec:
    """Checks a checkpoint against an architecture, from headers alone, and cuts its layers into segments.

    Args:
        checkpoint: the open checkpoint.
        arch: its architecture.
        dtype: of activations and dense weights.
        kv_bits: layer -> (bits of K, bits of V) of the KV cache.
        kv_hadamard: see `has_hadamard`.

    Raises:
        MissingTensorError, ShapeMismatchError: naming file, tensor, what came and what the config implies.
        UnsupportedFormatError: a fused tensor's blocks of scales do not fall apart into its parts.
    """
    layers = [layer_spec(checkpoint, arch, i, kv_bits(i), kv_hadamard) for i in range(arch.num_layers)]
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
