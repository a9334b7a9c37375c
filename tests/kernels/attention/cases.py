"""Attention problems that all tiers share: every width, group, precision and score function, on awkward lengths."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_cache import KVPages
from tests.kernels.attention.oracle import expected, random_pages, random_queries


@dataclass(frozen=True)
class Case:
    """One shape and score function; `page_len` 16 keeps the numpy oracle quick."""

    head_dim: int
    group: int
    k_bits: int = 16
    v_bits: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kv_heads: int = 2
    page_len: int = 16

    def __str__(self) -> str:
        extras = (
            [f"window{self.window}"] * bool(self.window) + ["softcap"] * bool(self.softcap) + ["sinks"] * self.sinks
        )
        return "-".join([f"H{self.head_dim}", f"G{self.group}", f"K{self.k_bits}V{self.v_bits}", *extras])

    def options(self) -> dict[str, Any]:
        heads = self.kv_heads * self.group
        sinks = jnp.asarray(np.random.default_rng(3).standard_normal(heads), jnp.float32) if self.sinks else None
        return {"scale": self.head_dim**-0.5, "window": self.window, "softcap": self.softcap, "sinks": sinks}


CASES = [
    Case(64, 1),
    Case(64, 3, 8, 8, kv_heads=3),
    Case(128, 4, 4, 4),
    Case(128, 4, 8, 4, sinks=True),
    Case(128, 8, 16, 8, window=20),
    Case(32, 16, 4, 16, softcap=4.0),
    Case(32, 2, 4, 8, window=50, sinks=True),
    Case(80, 7, 8, 16),
    Case(80, 2, 4, 4, window=16),
    Case(96, 4, 16, 4, softcap=20.0, sinks=True),
    Case(256, 2, 8, 8, kv_heads=1),
    Case(256, 4, 4, 4, kv_heads=1),
]
LENGTHS = (96, 0, 1, 15, 16, 17, 63, 64, 65)
STARTS, HISTORIES, NUM_ROWS = (0, 37, 38, 38, 70), (0, 63, 5, 80), 90


def quick(function: Callable[..., Any]) -> Callable[..., Any]:
    """jax.jit of a function that runs once: two thirds of the time to compile it would be optimisation."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def decode_problem(case: Case, dtype: Any) -> tuple[jax.Array, KVPages, jax.Array, jax.Array, np.ndarray]:
    """q, pages, tables, lengths and what they give."""
    pages, tables = random_pages(
        0, tables=len(LENGTHS), table_len=6, kv_heads=case.kv_heads, head_dim=case.head_dim, page_len=case.page_len,
        k_bits=case.k_bits, v_bits=case.v_bits, dtype=dtype,
    )  # fmt: skip
    q = random_queries(1, len(LENGTHS), case.kv_heads * case.group, case.head_dim, dtype)
    wanted = expected(q, pages, 1, tables, list(enumerate(LENGTHS)), **case.options())
    return q, pages, tables, jnp.asarray(LENGTHS, jnp.int32), wanted


@functools.cache
def prefill_problem(case: Case, dtype: Any) -> tuple[jax.Array, KVPages, jax.Array, jax.Array, jax.Array, np.ndarray]:
    """q, pages, tables, chunk starts, histories and what they give; chunk 2 is empty and 20 rows are padding."""
    pages, tables = random_pages(
        0, tables=len(HISTORIES), table_len=8, kv_heads=case.kv_heads, head_dim=case.head_dim, page_len=case.page_len,
        k_bits=case.k_bits, v_bits=case.v_bits, dtype=dtype,
    )  # fmt: skip
    q = random_queries(1, NUM_ROWS, case.kv_heads * case.group, case.head_dim, dtype)
    rows = [
        (chunk, HISTORIES[chunk] + r + 1)
        for chunk in range(len(HISTORIES))
        for r in range(STARTS[chunk + 1] - STARTS[chunk])
    ]
    rows += [(0, 0)] * (NUM_ROWS - len(rows))
    wanted = expected(q, pages, 1, tables, rows, **case.options())
    return q, pages, tables, jnp.asarray(STARTS, jnp.int32), jnp.asarray(HISTORIES, jnp.int32), wanted
