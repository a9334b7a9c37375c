"""How each linear runs: measured tables per GPU, and a rule for shapes and GPUs that have none.

A choice depends on the bucket of M, never on M itself, so a row's result is bitwise the same in any batch of a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.affine_linear.types import PackedLayout
from pallas_kernels.linears import bucket_of, from_entry, table_of

M_BUCKETS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Programs that the rule cuts the work into, for 132 multiprocessors of an H200: 3.4 each of 2 warps up to 16 rows, 2
# each of 4 warps beyond. Fewer leave loads waiting; more cost sums of splits, and x read again from L2.
TARGET_PROGRAMS_FEW_ROWS, TARGET_PROGRAMS = 448, 256
LEAST_ROWS = 8  # of a program: dots have no narrower side, and TMA copies whole tiles of 8 rows
TMA_ALIGNMENT = 128  # bytes, of its destinations in shared memory
MAX_HOPPER_RULE_ROWS = 1024  # 1 to 16 % faster there than dequantising; at 2048 0 to 4 %, beyond it was not measured


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
class HopperConfig:
    """How the Hopper kernel cuts the work.

    Attributes:
        tile_m: rows of x of a program.
        tile_n: columns of a warpgroup: 64, or 128 where scales multiply the weights.
        warpgroups: that multiply; one more copies.
        side_by_side: each warpgroup has columns of its own; else all have the same and take tiles of K in turn.
        splits: parts of K. Side by side they are summed in order afterwards; in turn they are the programs of a
            cluster, which sums them.
        num_stages: tiles of K in flight.
        scale_weights: as in `Config`; side by side only.
    """

    tile_m: int
    tile_n: int
    warpgroups: int
    side_by_side: bool
    splits: int
    num_stages: int
    scale_weights: bool

    @property
    def program_n(self) -> int:
        return self.tile_n * self.warpgroups if self.side_by_side else self.tile_n

    @property
    def num_registers(self) -> int:
        """Of a thread when the program starts, which is what the compiler counts with."""
        return 65536 // (128 * (self.warpgroups + 1)) // 8 * 8

    @property
    def num_partials(self) -> int:
        return self.splits if self.side_by_side else 1

    @property
    def cluster_size(self) -> int:
        return 1 if self.side_by_side else self.splits


@dataclass(frozen=True)
class Dequantise:
    """Write the layer's 16-bit values out, then one XLA dot: wins where a dot is long against that."""


Choice = Config | HopperConfig | Dequantise
PATHS: dict[str, type[Choice]] = {"fused": Config, "hopper": HopperConfig, "dequantise": Dequantise}


def shared_bytes(config: Config, w: PackedLayout) -> int:
    """Upper bound of the shared memory of a program: every stage holds its words and its x."""
    return config.num_stages * (config.block_n * w.plane_width + config.block_m * w.tile_k) * 2 // config.parts


def param_slot(config: HopperConfig, w: PackedLayout, itemsize: int) -> tuple[int, int]:
    """Rows and columns of a tile's scales or zero points in shared memory, where TMA wants multiples of 128 bytes."""
    return max(w.groups_per_tile, TMA_ALIGNMENT // (config.program_n * itemsize)), config.program_n


def hopper_shared_bytes(
    config: HopperConfig, w: PackedLayout, param_sizes: Sequence[int], out_bytes: int, store_m: int
) -> int:
    """Shared memory of a program of the Hopper kernel, barriers rounded up.

    Args:
        param_sizes: bytes of a scale and of a zero point.
        out_bytes: of an element of the result.
        store_m: rows of a piece of the result on its way out.
    """
    stage = 2 * (config.program_n * w.plane_width + config.tile_m * w.tile_k)
    stage += sum(math.prod(param_slot(config, w, itemsize)) * itemsize for itemsize in param_sizes)
    writers = config.warpgroups if config.side_by_side else 1
    sums = 0 if config.side_by_side else config.warpgroups + config.splits - 2  # that others hand over
    results = writers * 2 * store_m * 64 * out_bytes + sums * 64 * config.tile_m * 4
    return config.num_stages * stage + results + 1024


def fits_registers(config: HopperConfig, w: PackedLayout) -> bool:
    """Whether a multiplying thread's sums of groups and their total, words, two unpacked planes and zeros fit.

    Where they do not, the compiler lets no two wgmma overlap (C7512).
    """
    sums = (w.groups_per_tile + 1) * config.tile_m // 2
    return config.scale_weights or sums + 16 + 32 + 4 * (w.kind == "zero") <= config.num_registers


def fits_hopper(config: HopperConfig, w: PackedLayout, N_padded: int) -> bool:
    """Whether the Hopper kernel can run so: its GPU and format, whole tiles, registers, memory for the stages."""
    takes = w.bits == 4 and w.plane_width == 64 and w.K % w.tile_k == 0 and w.kind in ("symmetric", "zero")
    whole = N_padded % config.program_n == 0 and config.splits <= w.num_tiles
    takes_turns = config.side_by_side or config.num_stages % config.warpgroups == 0  # each in slots of its own
    param_sizes = (4, 1) if w.kind == "zero" else (4,)
    memory = hopper_shared_bytes(config, w, param_sizes, out_bytes=4, store_m=min(config.tile_m, 16))
    fits = memory <= backend.shared_bytes() and fits_registers(config, w)
    return backend.compute_capability() == backend.HOPPER and takes and whole and takes_turns and fits


def fits(choice: Choice, w: PackedLayout, N_padded: int) -> bool:
    """Whether the kernel can run so: whole column tiles, a tile of K for each split, memory for the stages."""
    if isinstance(choice, Dequantise):
        return True
    if isinstance(choice, HopperConfig):
        return fits_hopper(choice, w, N_padded)
    return (
        N_padded % choice.block_n == 0
        and choice.splits <= w.num_tiles
        and shared_bytes(choice, w) <= backend.shared_bytes()
        and w.plane_width // choice.parts >= 32  # a dot of two steps of the tensor cores at least
    )


# Of the Hopper kernel, by most rows: tile_m, tile_n, warpgroups, side_by_side, stages, and microseconds of a step (a
# tile of 256 rows of K for a program) on an H200 whose other multiprocessors work too
HOPPER_CHOICES: dict[int, tuple[tuple[int, int, int, bool, int, float], ...]] = {
    8: ((8, 64, 4, True, 5, 1.10), (8, 64, 4, False, 12, 0.29), (8, 64, 2, False, 8, 0.31)),
    16: ((16, 64, 4, True, 4, 1.10), (16, 64, 3, False, 9, 0.30), (16, 64, 2, False, 8, 0.31)),
    32: ((32, 64, 4, True, 3, 1.34), (32, 64, 3, False, 6, 0.39), (32, 64, 2, False, 6, 0.39)),
    64: ((64, 64, 2, True, 4, 1.00), (64, 64, 2, False, 4, 0.55)),
    4096: ((128, 128, 2, True, 2, 2.72), (128, 64, 2, True, 2, 1.60)),
}
_LAUNCH_US, _FEW_ROWS_LAUNCH_US = 4.0, 3.0  # start, first copies, last stores
_SPLIT_US, _SPLIT_BYTES_PER_US = 1.1, 3.2e6  # sums of splits: what another kernel or a cluster costs, and its bytes


def hopper_us(config: HopperConfig, step_us: float, bucket: int, w: PackedLayout, N_padded: int) -> float:
    """Estimated microseconds of the Hopper kernel: rounds of programs, each as many steps; within 10 % of measured."""
    tiles = pl.cdiv(bucket, config.tile_m) * N_padded // config.program_n * config.splits
    steps = pl.cdiv(tiles, backend.HOPPER_MULTIPROCESSORS) * w.num_tiles / config.splits
    split_bytes = 4 * config.num_partials * bucket * N_padded if config.num_partials > 1 else 0
    sums = (config.splits > 1) * _SPLIT_US + split_bytes / _SPLIT_BYTES_PER_US
    return steps * step_us + sums + (_LAUNCH_US if config.scale_weights else _FEW_ROWS_LAUNCH_US)


def hopper_candidates(bucket: int, w: PackedLayout, N_padded: int) -> list[HopperConfig]:
    """The Hopper kernel's variants that fit, the most promising first.

    None where they leave half of the multiprocessors idle. Splits only where all programs run at once: clusters are not
    resident, and partial sums cost more than they fill.
    """
    if bucket < LEAST_ROWS:
        return []
    found = []
    for tile_m, tile_n, warpgroups, side_by_side, stages, step_us in _of_bucket(HOPPER_CHOICES, bucket):
        scaled = bucket > 64
        for splits in (1, 2, 4, 8) if scaled else (1,) if side_by_side else (1, 2):
            config = HopperConfig(tile_m, tile_n, warpgroups, side_by_side, splits, stages, scaled)
            tiles = pl.cdiv(bucket, tile_m) * N_padded // config.program_n * splits
            fills = tiles <= backend.HOPPER_MULTIPROCESSORS or splits == 1
            if 2 * tiles >= backend.HOPPER_MULTIPROCESSORS and fills and fits_hopper(config, w, N_padded):
                found.append((hopper_us(config, step_us, bucket, w, N_padded), config))
    return [config for _, config in sorted(found, key=lambda pair: pair[0])]


_SCALED: dict[str, Any] = {"scale_weights": True}
_HALF: dict[str, Any] = {"parts": 2, "scale_weights": True}
# Buckets up to the key: block_m, block_n, warps, stages and what differs from the defaults, first or near it on an H200
_CANDIDATES: dict[int, tuple[tuple[int, int, int, int, dict[str, Any]], ...]] = {
    LEAST_ROWS: ((8, 32, 2, 3, {}), (8, 32, 1, 3, {}), (8, 64, 2, 3, {})),
    16: ((16, 32, 2, 3, {}), (16, 64, 2, 3, {}), (16, 64, 4, 3, {})),
    32: ((32, 128, 4, 3, {}), (32, 64, 4, 3, {})),
    64: ((64, 128, 4, 2, _SCALED), (64, 256, 4, 3, _HALF), (64, 64, 4, 3, {})),
    256: ((128, 128, 4, 3, _HALF), (64, 256, 4, 3, _HALF), (64, 64, 4, 3, {})),
    4096: ((128, 128, 4, 3, _HALF),),
}


def _of_bucket(by_rows: dict[int, Any], bucket: int) -> Any:
    return next(value for most, value in by_rows.items() if bucket <= most)


def candidates(bucket: int, w: PackedLayout, N_padded: int) -> list[Choice]:
    """What tuning tries for a bucket of rows; all of it lowers and fits."""
    found: list[Choice] = [] if bucket <= 64 else [Dequantise()]
    found += hopper_candidates(bucket, w, N_padded)[:4]
    targets = (224, 448, 576, 896) if bucket <= 64 else (128, 256, 448)  # programs
    for block_m, block_n, warps, stages, options in _of_bucket(_CANDIDATES, bucket):
        programs = N_padded // block_n * pl.cdiv(bucket, block_m)
        for splits in sorted({max(1, round(target / programs)) for target in targets if programs}):
            config = Config(block_m, block_n, splits, warps, stages, **options)
            if fits(config, w, N_padded):
                found.append(config)
    return found


def rule(bucket: int, w: PackedLayout, N_padded: int) -> Choice:
    """The choice where nothing was measured: the Hopper kernel's best where it can run, else Triton's."""
    hopper = hopper_candidates(bucket, w, N_padded) if bucket <= MAX_HOPPER_RULE_ROWS else []
    return hopper[0] if hopper else triton_rule(bucket, w, N_padded)


def triton_rule(bucket: int, w: PackedLayout, N_padded: int) -> Config | Dequantise:
    """The choice for other GPUs and formats: wide tiles of columns where they fit, else 64 columns."""
    if bucket > 256:
        return Dequantise()
    wide = {
        32: Config(32, 128, 1, 4, 3),
        64: Config(64, 128, 1, 4, 2, scale_weights=True),
        128: Config(128, 128, 1, 4, 3, parts=2, scale_weights=True),
    }
    few = bucket <= 16
    narrow = Config(min(max(bucket, LEAST_ROWS), 64), 64 if N_padded > 8192 or not few else 32, 1, 2 if few else 4, 3)
    for base in (narrow,) if few else (wide[min(bucket, 128)], narrow):
        programs = N_padded // base.block_n * pl.cdiv(bucket, base.block_m)
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


def choose(M: int, w: PackedLayout, N: int, N_padded: int, *, interpret: bool = False) -> Choice:
    """The measured choice for this shape and bucket if it fits, else the rule's; Triton's rule for the interpreter."""
    bucket = bucket_of(M, M_BUCKETS)
    if interpret:
        return triton_rule(bucket, w, N_padded)
    entry = table_of(__package__, backend.device_kind()).get(key_of(bucket, w, N))
    if entry is not None and fits(choice := from_entry(entry, PATHS), w, N_padded):
        return choice
    return rule(bucket, w, N_padded)
