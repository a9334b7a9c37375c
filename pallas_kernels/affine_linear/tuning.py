"""How each linear runs: measured tables per GPU, and a rule for shapes and GPUs that have none.

A choice depends on the bucket of M, never on M itself, so a row's result is bitwise the same in any batch of a bucket.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from pallas_kernels import backend
from pallas_kernels.affine_linear.types import PackedLayout
from pallas_kernels.linears import bucket_of, table_of

M_BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Programs that the rule cuts the work into, for 132 multiprocessors of an H200: 3.4 each of 2 warps up to 16 rows, 2
# each of 4 warps beyond. Fewer leave loads waiting; more cost sums of splits, and x read again from L2.
TARGET_PROGRAMS_FEW_ROWS, TARGET_PROGRAMS = 448, 256


@dataclass(frozen=True)
class Config:
    """How the fused kernel cuts the work.

    Attributes:
        block_m: rows of x of a program.
        block_n: columns of a program.
        splits: parts of K, summed in order afterwards.
        num_warps, num_stages: as Triton takes them.
        parts: pieces of a K tile, one an iteration: 2 halve the shared memory of a stage.
        scale_weights: scales multiply the weights, rounded to x's dtype, and one float32 sum runs over all of K;
            otherwise they multiply each group's float32 sum, which is more exact and takes as many registers again.
    """

    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int
    parts: int = 1
    scale_weights: bool = False


@dataclass(frozen=True)
class Dequantise:
    """Write the layer's 16-bit values out, then one XLA dot: wins where a dot is long against that."""


Choice = Config | Dequantise


def shared_bytes(config: Config, w: PackedLayout) -> int:
    """Upper bound of the shared memory of a program: every stage holds its words and its x."""
    return config.num_stages * (config.block_n * w.plane_width + config.block_m * w.tile_k) * 2 // config.parts


def fits(config: Config, w: PackedLayout, N_padded: int) -> bool:
    """Whether the kernel can run so: whole column tiles, a tile of K for each split, memory for the stages."""
    return (
        N_padded % config.block_n == 0
        and config.splits <= w.num_tiles
        and shared_bytes(config, w) <= backend.shared_bytes()
        and w.plane_width // config.parts >= 32  # a dot of two steps of the tensor cores at least
    )


_SCALED: dict[str, Any] = {"scale_weights": True}
_HALF: dict[str, Any] = {"parts": 2, "scale_weights": True}
# Buckets up to the key: block_m, block_n, warps, stages and what differs from the defaults, first or near it on an H200
_CANDIDATES: dict[int, tuple[tuple[int, int, int, int, dict[str, Any]], ...]] = {
    8: ((8, 32, 2, 3, {}), (8, 32, 1, 3, {}), (8, 64, 2, 3, {})),
    16: ((16, 32, 2, 3, {}), (16, 64, 2, 3, {}), (16, 64, 4, 3, {})),
    32: ((32, 128, 4, 3, {}), (32, 64, 4, 3, {})),
    64: ((64, 128, 4, 2, _SCALED), (64, 256, 4, 3, _HALF), (64, 64, 4, 3, {})),
    256: ((128, 128, 4, 3, _HALF), (64, 256, 4, 3, _HALF), (64, 64, 4, 3, {})),
    4096: ((128, 128, 4, 3, _HALF),),
}


def candidates(bucket: int, w: PackedLayout, N_padded: int) -> list[Choice]:
    """What tuning tries for a bucket of rows; all of it lowers and fits."""
    found: list[Choice] = [] if bucket <= 64 else [Dequantise()]
    targets = (224, 448, 576, 896) if bucket <= 64 else (128, 256, 448)  # programs
    for block_m, block_n, warps, stages, options in next(c for most, c in _CANDIDATES.items() if bucket <= most):
        programs = N_padded // block_n * (bucket // block_m)
        for splits in sorted({max(1, round(target / programs)) for target in targets if programs}):
            config = Config(block_m, block_n, splits, warps, stages, **options)
            if fits(config, w, N_padded):
                found.append(config)
    return found


def rule(bucket: int, w: PackedLayout, N_padded: int) -> Choice:
    """The choice where nothing was measured: wide tiles of columns where they fit, else 64 columns."""
    if bucket > 256:
        return Dequantise()
    wide = {
        32: Config(32, 128, 1, 4, 3),
        64: Config(64, 128, 1, 4, 2, scale_weights=True),
        128: Config(128, 128, 1, 4, 3, parts=2, scale_weights=True),
    }
    few = bucket <= 16
    narrow = Config(min(bucket, 64), 64 if N_padded > 8192 or not few else 32, 1, 2 if few else 4, 3)
    for base in (narrow,) if few else (wide[min(bucket, 128)], narrow):
        programs = N_padded // base.block_n * (bucket // base.block_m)
        target = TARGET_PROGRAMS_FEW_ROWS if few else TARGET_PROGRAMS
        splits = max(1, min(w.num_tiles, round(target / programs))) if programs else 1
        for stages in range(base.num_stages, 0, -1):
            config = replace(base, splits=splits, num_stages=stages)
            if fits(config, w, N_padded):
                return config
    return Dequantise()


def key_of(bucket: int, w: PackedLayout, N: int) -> str:
    """The key of a table's entry."""
    return f"w{w.bits} g{w.group_size if w.num_groups > 1 else -1} M{bucket} K{w.K} N{N}"


def to_entry(choice: Choice) -> dict[str, Any]:
    """The choice as a table holds it."""
    return {"path": "dequantise"} if isinstance(choice, Dequantise) else {"path": "fused", **asdict(choice)}


def from_entry(entry: dict[str, Any]) -> Choice:
    """The inverse of `to_entry`; other fields, times say, are for people."""
    if entry["path"] == "dequantise":
        return Dequantise()
    return Config(**{name: entry[name] for name in Config.__dataclass_fields__ if name in entry})


def choose(M: int, w: PackedLayout, N: int, N_padded: int) -> Choice:
    """The measured choice for this shape and bucket if it fits, else the rule's."""
    bucket = bucket_of(M, M_BUCKETS)
    entry = table_of(__package__, backend.device_kind()).get(key_of(bucket, w, N))
    if entry is not None:
        choice = from_entry(entry)
        if isinstance(choice, Dequantise) or fits(choice, w, N_padded):
            return choice
    return rule(bucket, w, N_padded)
