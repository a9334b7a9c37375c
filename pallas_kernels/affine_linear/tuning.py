"""How each linear runs: measured tables per GPU, and a rule for shapes and GPUs that have none.

A choice depends on the bucket of M, never on M itself, so a row's result is bitwise the same in any batch of a bucket.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any

from pallas_kernels import backend
from pallas_kernels.affine_linear.types import PackedLayout

M_BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Programs that the rule cuts the work into, for 132 multiprocessors of an H200: 3.4 each of 2 warps up to 16 rows, 2
# each of 4 warps beyond. Fewer leave loads waiting; more cost sums of splits, and x read again from L2.
TARGET_PROGRAMS_FEW_ROWS, TARGET_PROGRAMS = 448, 256
SHARED_BYTES = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10, (12, 0): 99 << 10}
MOST_SHARED_BYTES = 227 << 10


@dataclass(frozen=True)
class Config:
    """How the fused kernel cuts the work.

    Attributes:
        block_m: rows of x of a program.
        block_n: columns of a program.
        splits: parts of K, summed in order afterwards.
        num_warps, num_stages: as Triton takes them.
        x_left: x is the dot's left operand; the weights are otherwise, from registers.
    """

    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int
    x_left: bool = False


@dataclass(frozen=True)
class Dequantise:
    """Write the layer's 16-bit values out, then one XLA dot: wins where a dot is long against that."""


Choice = Config | Dequantise


def bucket_of(M: int) -> int:
    """The smallest bucket that holds M rows, or the largest bucket."""
    return next((bucket for bucket in M_BUCKETS if bucket >= M), M_BUCKETS[-1])


def shared_bytes(config: Config, w: PackedLayout) -> int:
    """Upper bound of the shared memory of a program: every stage holds its words and its x."""
    return config.num_stages * (config.block_n * w.plane_width * 2 + config.block_m * w.tile_k * 2)


def fits(config: Config, w: PackedLayout, N_padded: int) -> bool:
    """Whether the kernel can run so: whole column tiles, a tile of K for each split, memory for the stages."""
    limit = SHARED_BYTES.get(backend.compute_capability() or (9, 0), MOST_SHARED_BYTES)
    return (
        N_padded % config.block_n == 0
        and config.splits <= w.num_tiles
        and shared_bytes(config, w) <= limit
        and (config.block_m >= 16 or not config.x_left)
    )


def candidates(bucket: int, w: PackedLayout, N_padded: int) -> list[Choice]:
    """What tuning tries for a bucket of rows; all of it lowers and fits."""
    shapes = {  # block_m, block_n, warps, stages, x_left: what came first or near it on an H200
        8: (
            (8, 64, 2, 3, False),
            (8, 64, 4, 3, False),
            (8, 128, 4, 3, False),
            (8, 32, 2, 3, False),
            (8, 32, 1, 3, False),
        ),
        16: ((16, 64, 2, 3, False), (16, 64, 4, 3, False), (16, 128, 4, 3, True), (16, 256, 8, 3, True)),
        32: ((32, 64, 4, 2, False), (32, 64, 4, 3, False), (32, 128, 4, 3, True), (32, 256, 8, 3, True)),
        64: ((64, 64, 4, 3, False), (64, 64, 4, 2, False), (64, 128, 8, 3, False)),
    }
    large = ((64, 64, 4, 3, False), (64, 64, 4, 2, False), (128, 64, 4, 2, False), (128, 128, 8, 2, False))
    found: list[Choice] = [] if bucket <= 64 else [Dequantise()]
    for block_m, block_n, warps, stages, x_left in shapes.get(bucket, large):
        tiles = N_padded // block_n * max(1, bucket // block_m)
        base = Config(block_m, block_n, 1, warps, stages, x_left)
        targets = (224, TARGET_PROGRAMS_FEW_ROWS, 896) if bucket <= 16 else (TARGET_PROGRAMS, TARGET_PROGRAMS_FEW_ROWS)
        wanted = {max(1, round(target / tiles)) for target in targets}
        splits = sorted(s for s in wanted if s == 1 or s * tiles < 1000)
        found += [config for s in splits if fits(config := replace(base, splits=s), w, N_padded)]
    return found


def rule(bucket: int, w: PackedLayout, N_padded: int) -> Choice:
    """The choice where nothing was measured."""
    if bucket > 256:
        return Dequantise()
    block_m, few = min(bucket, 64), bucket <= 16
    programs = N_padded // 64 * (bucket // block_m)
    splits = max(1, min(w.num_tiles, round((TARGET_PROGRAMS_FEW_ROWS if few else TARGET_PROGRAMS) / programs)))
    warps, stages = (2 if few else 4), 3
    config = Config(block_m, 64, splits, warps, stages)
    while not fits(config, w, N_padded) and config.num_stages > 1:
        config = replace(config, num_stages=config.num_stages - 1)
    return config if fits(config, w, N_padded) else Dequantise()


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
    return Config(**{name: entry[name] for name in Config.__dataclass_fields__})


@functools.cache
def table_of(device_kind: str) -> dict[str, dict[str, Any]]:
    """The measured choices for a GPU, empty where none were committed."""
    name = device_kind.lower().replace(" ", "_") + ".json"
    file = resources.files(__package__) / "tables" / name
    return json.loads(file.read_text())["entries"] if file.is_file() else {}


def choose(M: int, w: PackedLayout, N: int, N_padded: int) -> Choice:
    """The measured choice for this shape and bucket if it fits, else the rule's."""
    bucket = bucket_of(M)
    entry = table_of(backend.device_kind()).get(key_of(bucket, w, N))
    if entry is not None:
        choice = from_entry(entry)
        if isinstance(choice, Dequantise) or fits(choice, w, N_padded):
            return choice
    return rule(bucket, w, N_padded)
