"""How each eight-bit linear runs: measured tables per GPU, and a rule for shapes and GPUs that have none.

A choice depends on the bucket of M, never on M itself, so a row's result is bitwise the same in any batch of a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.eight_bit_linear.types import BLOCK, EightBitWeights
from pallas_kernels.linears import bucket_of, from_entry, table_of

M_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TARGET_PROGRAMS = 448  # of the Triton kernel at few rows; splits of K make up for few outputs

# What the Hopper kernel's cost model counts with, in cycles of a multiprocessor at 1.75 GHz.
MULTIPLIES_PER_CYCLE = 4096
COPIED_BYTES_PER_CYCLE = 62  # L2 to shared memory: 256 rows of 14336 x 4096 took 25 us with tiles of 64 x 128
SUMMED_BYTES_PER_CYCLE = 2450  # of all multiprocessors: 4.3 TB/s
LAUNCH_CYCLES = 3500  # the sum over splits is a kernel of its own: 2 us
TILE_CYCLES = 2000  # to fill the pipeline and write the result


@dataclass(frozen=True)
class Config:
    """How the Triton kernel cuts the work.

    Attributes:
        block_m: rows of x of a program.
        block_n: outputs of a program.
        block_k: columns of a step.
        splits: parts of K, summed in order afterwards.
        num_warps, num_stages: as Triton takes them.
        x_left: x is the dot's left operand, else the weights are.
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    x_left: bool


@dataclass(frozen=True)
class HopperConfig:
    """How the Hopper kernel cuts the work.

    Attributes:
        tile_m: rows of x of a warpgroup; a program has two.
        tile_n: outputs of a warpgroup.
        side_by_side: the two warpgroups share rows, else they share outputs.
        splits: parts of K, summed in order afterwards.
        num_stages: steps of 128 columns in flight.
    """

    tile_m: int
    tile_n: int
    side_by_side: bool
    splits: int
    num_stages: int

    @property
    def program_m(self) -> int:
        return self.tile_m if self.side_by_side else 2 * self.tile_m

    @property
    def program_n(self) -> int:
        return 2 * self.tile_n if self.side_by_side else self.tile_n


@dataclass(frozen=True)
class Dequantise:
    """Write the layer's 16-bit values out, then one XLA dot: many rows on a GPU that cannot multiply e4m3."""


Choice = Config | HopperConfig | Dequantise
PATHS: dict[str, type[Choice]] = {"triton": Config, "hopper": HopperConfig, "dequantise": Dequantise}


def wraps_offsets(w: EightBitWeights) -> bool:
    """Whether Triton would read the stack at wrong places: Pallas takes 64-bit offsets from 2**32 bytes on, and up to
    there 32-bit ones with a sign, which 8-bit elements exceed at half of that."""
    return 2**31 < w.codes.size <= 2**32


def multiplies(w: EightBitWeights) -> bool:
    """Whether the tensor cores that ops are traced for take the codes as they are."""
    return w.codes.dtype == jnp.int8 or backend.capability_problem(backend.MIN_FP8_CAPABILITY) is None


def fits(choice: Choice, w: EightBitWeights) -> bool:
    """Whether this GPU can run so: its kind, whole tiles where TMA copies them, memory for the stages."""
    if isinstance(choice, Dequantise):
        return w.codes.dtype != jnp.int8
    if isinstance(choice, HopperConfig):
        fits_blocks = not w.has_blocks or choice.tile_n <= BLOCK
        whole_tiles = w.K % (BLOCK * choice.splits) == 0 and w.N % choice.program_n == 0
        return backend.compute_capability() == backend.HOPPER and whole_tiles and fits_blocks
    limit = backend.shared_bytes()
    stage_bytes = choice.block_k * (choice.block_n + choice.block_m * (1 if multiplies(w) else 2))
    fits_blocks = not w.has_blocks or choice.block_k <= BLOCK
    return stage_bytes * choice.num_stages <= limit and choice.splits <= pl.cdiv(w.K, choice.block_k) and fits_blocks


def hopper_cycles(config: HopperConfig, bucket: int, w: EightBitWeights) -> float:
    """Estimated time of the Hopper kernel: rounds of resident programs, each bound by multiplying or by copying."""
    m, n = config.program_m, config.program_n
    tiles = pl.cdiv(bucket, m) * pl.cdiv(w.N, n) * config.splits
    multiply, copy = m * n * BLOCK / MULTIPLIES_PER_CYCLE, (m + n) * BLOCK / COPIED_BYTES_PER_CYCLE
    tile = TILE_CYCLES + w.K / BLOCK / config.splits * max(multiply, copy)
    split_bytes = 8 * config.splits * bucket * w.N  # float32, written and read
    sum_splits = LAUNCH_CYCLES + split_bytes / SUMMED_BYTES_PER_CYCLE if config.splits > 1 else 0
    return pl.cdiv(tiles, backend.HOPPER_MULTIPROCESSORS) * tile + sum_splits


def hopper_candidates(bucket: int, w: EightBitWeights) -> list[HopperConfig]:
    """The Hopper kernel's variants that fit, the most promising first."""
    tiles = [(64, 128, True, 4), (64, 64, True, 8)]  # tile_m, tile_n, side_by_side, stages
    if bucket > 64:  # two sums of 128 x 128, a step's and the whole's, would not fit a warpgroup's registers
        tiles.append((64, 128, False, 4) if w.has_blocks else (128, 128, True, 4))
    variants = [HopperConfig(m, n, beside, s, stages) for m, n, beside, stages in tiles for s in (1, 2, 4, 7, 8)]
    fitting = [config for config in variants if fits(config, w)]
    return sorted(fitting, key=lambda config: hopper_cycles(config, bucket, w))


def triton_candidates(bucket: int, w: EightBitWeights) -> list[Config]:
    """The Triton kernel's variants that fit, the most promising first."""
    if bucket <= 16:  # block_m, block_n, block_k, warps, stages, x_left
        shapes = [(16, 64, 128, 4, 4, False), (16, 64, 256, 4, 3, False), (16, 64, 128, 2, 4, False)]
    elif bucket <= 64:
        shapes = [(64, 64, 128, 4, 3, False), (64, 128, 128, 4, 3, False)]
    else:
        shapes = [(128, 128, 128, 8, 3, True), (64, 128, 128, 4, 3, True)]
    found = []
    for m, n, k, warps, stages, x_left in shapes:
        programs = pl.cdiv(bucket, m) * pl.cdiv(w.N, n)
        splits = max(1, min(pl.cdiv(w.K, k), round(TARGET_PROGRAMS / programs))) if bucket <= 64 else 1
        found += [Config(m, n, k, splits, warps, fewer, x_left) for fewer in range(stages, 1, -1)]
    return [config for config in found if fits(config, w)]


def candidates(bucket: int, w: EightBitWeights) -> list[Choice]:
    """What tuning tries for a bucket of rows; all of it lowers and fits."""
    dequantise = [Dequantise()] if not multiplies(w) and bucket > 64 else []
    return [*dequantise, *hopper_candidates(bucket, w)[:6], *triton_candidates(bucket, w)]


def rule(bucket: int, w: EightBitWeights) -> Choice:
    """The choice where nothing was measured."""
    # up to 16 rows Triton's narrow dots win by 5 %
    hopper = hopper_candidates(bucket, w) if bucket > 16 or wraps_offsets(w) else []
    return hopper[0] if hopper else triton_rule(bucket, w)


def triton_rule(bucket: int, w: EightBitWeights) -> Choice:
    """The choice without the Hopper kernel."""
    return Dequantise() if not multiplies(w) and bucket > 64 else triton_candidates(bucket, w)[0]


def key_of(bucket: int, w: EightBitWeights) -> str:
    """The key of a table's entry."""
    return f"{w.codes.dtype}{' blocks' if w.has_blocks else ''} M{bucket} K{w.K} N{w.N}"


def choose(M: int, w: EightBitWeights, *, interpret: bool = False) -> Choice:
    """The measured choice for this shape and bucket if it fits, else the rule's; Triton's rule for the interpreter."""
    bucket = bucket_of(M, M_BUCKETS)
    if interpret:
        return triton_rule(bucket, w)
    entry = table_of(__package__, backend.device_kind()).get(key_of(bucket, w))
    if entry is None or wraps_offsets(w) or not fits(choice := from_entry(entry, PATHS), w):
        return rule(bucket, w)
    return choice
