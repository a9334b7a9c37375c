"""What the quantised linears share: checks of x, a kernel's store and the sum of its splits, measured tables."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend

ACTIVATION_DTYPES = ("float32", "bfloat16", "float16")


def check_rows(x: jax.Array, K: int) -> None:
    """Holds x against [M, K].

    Raises:
        ValueError: names what came and what is accepted.
    """
    if x.ndim != 2 or x.shape[1] != K:
        raise ValueError(f"x: shape {x.shape}, accepted: [M, {K}]")
    if str(x.dtype) not in ACTIVATION_DTYPES:
        raise ValueError(f"x: dtype {x.dtype}, accepted: {', '.join(ACTIVATION_DTYPES)}")


def kernel_problem(x: jax.Array) -> str | None:
    """Why the kernels cannot take x here; None where they can."""
    if x.dtype == jnp.float32:
        return "x is float32, and the kernels compute with bfloat16 or float16 x"
    return backend.capability_problem()


def store_tile(out_ref, tile: jax.Array, split: Any, row_tile: Any, column_tile: Any) -> None:
    """Inside a Triton kernel: writes the tile [BM, BN] into out [splits, M, N], without what lies past M and N."""
    (BM, BN), (_, M, N) = tile.shape, out_ref.shape
    rows = (row_tile * BM + jnp.arange(BM))[:, None]
    columns = (column_tile * BN + jnp.arange(BN))[None, :]
    masks = [rows < M] * (M % BM != 0) + [columns < N] * (N % BN != 0)
    rows, columns = jnp.broadcast_arrays(rows, columns)
    mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), rows.shape) if masks else None
    backend.masked_store(out_ref.at[split, rows, columns], tile, mask=mask)


def sum_partial(partial: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """The splits of K [S, M, N] summed in order, in float32 -> [M, N]."""
    return (partial[0] if partial.shape[0] == 1 else partial.sum(0)).astype(out_dtype)


def bucket_of(M: int, buckets: Sequence[int]) -> int:
    """The smallest of the rising buckets that holds M rows, or the largest."""
    return next((bucket for bucket in buckets if bucket >= M), buckets[-1])


@functools.cache
def table_of(package: str, device_kind: str) -> dict[str, dict[str, Any]]:
    """A package's measured choices for a GPU, from `tables/<device>.json`; empty where none were committed."""
    file = resources.files(package) / "tables" / (device_kind.lower().replace(" ", "_") + ".json")
    return json.loads(file.read_text())["entries"] if file.is_file() else {}


def to_entry(choice: Any, paths: Mapping[str, type]) -> dict[str, Any]:
    """A choice as a table holds it: its fields, and the path that its type stands for in `paths`."""
    path = next(name for name, kind in paths.items() if isinstance(choice, kind))
    return {"path": path, **asdict(choice)}


def from_entry(entry: Mapping[str, Any], paths: Mapping[str, type]) -> Any:
    """The inverse of `to_entry`; other fields, times say, are for people."""
    kind = paths[entry["path"]]
    return kind(**{field.name: entry[field.name] for field in fields(kind)})
