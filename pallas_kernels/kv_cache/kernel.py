"""KV write in Pallas-Triton: rows of K and V are quantised in registers and stored into their pages, in place."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.kv_cache.pages import KVPages
from pallas_kernels.kv_cache.quantise import FLOAT16_MAX


@dataclass(frozen=True)
class WriteConfig:
    """Rows of a program, and its warps."""

    rows: int = 16
    num_warps: int = 4


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _write_side(
    x_ref: Any, out_ref: Any, params_ref: Any, at: tuple[jax.Array, ...], rows: jax.Array, valid: jax.Array, bits: int
) -> None:
    """Quantises x_ref[rows, head] and stores it; `at` is (layer, pages [rows], head, offsets [rows])."""
    layer, pages, head, offsets = at
    head_dim = x_ref.shape[2]
    planes = 1 if bits == 16 else 16 // bits
    width = head_dim // planes
    columns = jnp.arange(_power_of_2(width), dtype=jnp.int32)
    mask = valid[:, None] & (columns < width)[None, :]

    def read(plane: int) -> jax.Array:
        index = jnp.broadcast_arrays(rows[:, None], (plane * width + jnp.minimum(columns, width - 1))[None, :])
        return backend.masked_load(x_ref.at[index[0], head, index[1]], mask=mask, other=0.0)

    def store(values: jax.Array) -> None:
        # Masked places keep columns of their own: the interpreter writes old values back there.
        index = jnp.broadcast_arrays(pages[:, None], offsets[:, None], columns[None, :])
        where = out_ref.at[layer, index[0], head, index[1], index[2]]
        backend.masked_store(where, values.astype(out_ref.dtype), mask=mask)

    if bits == 16:
        store(read(0))
        return
    # Padding columns repeat the plane's last value through the clipped index, so they move neither bound.
    parts = [jnp.clip(read(j).astype(jnp.float32), -FLOAT16_MAX, FLOAT16_MAX) for j in range(planes)]
    real = (columns < width)[None, :]
    low = functools.reduce(jnp.minimum, [jnp.min(jnp.where(real, x, FLOAT16_MAX), axis=1) for x in parts])
    high = functools.reduce(jnp.maximum, [jnp.max(jnp.where(real, x, -FLOAT16_MAX), axis=1) for x in parts])
    levels = 2**bits - 1
    scale, offset = ((high - low) / levels).astype(jnp.float16), low.astype(jnp.float16)
    step, base = scale.astype(jnp.float32), offset.astype(jnp.float32)
    step = jnp.where(step > 0, step, 1.0)  # a constant vector: codes 0, value = offset
    words = jnp.zeros(mask.shape, jnp.int32)
    for j, x in enumerate(parts):
        codes = jnp.clip((x - base[:, None]) / step[:, None] + 0.5, 0.0, float(levels))
        words = words | (codes.astype(jnp.int32) << (bits * j))  # the conversion truncates: rounded to nearest
    store(words.astype(jnp.uint16))
    for row, values in enumerate((scale, offset)):
        backend.masked_store(params_ref.at[layer, pages, head, row, offsets], values, mask=valid)


def _kernel(*args: Any, names: tuple[str, ...], config: WriteConfig, num_rows: int, k_bits: int, v_bits: int) -> None:
    """One program: some rows of one kv head, K and V."""
    refs = dict(zip(names, args, strict=True))
    rows = pl.program_id(0) * config.rows + jnp.arange(config.rows, dtype=jnp.int32)
    valid, rows = rows < num_rows, jnp.minimum(rows, num_rows - 1)
    pages = backend.masked_load(refs["page_ids"].at[rows], mask=valid, other=0)
    offsets = backend.masked_load(refs["page_offsets"].at[rows], mask=valid, other=0)
    at = (refs["layer"][0], pages, pl.program_id(1), offsets)
    for side, bits in (("k", k_bits), ("v", v_bits)):
        _write_side(refs["new_" + side], refs["out_" + side], refs.get(f"out_{side}_params"), at, rows, valid, bits)


def kernel_write(
    pages: KVPages, k: jax.Array, v: jax.Array, layer: jax.Array, page_ids: jax.Array, page_offsets: jax.Array,
    config: WriteConfig, interpret: bool,
) -> KVPages:  # fmt: skip
    """See `write_kv`."""
    num_rows = page_ids.shape[0]
    inputs = {"layer": layer.reshape(1), "page_ids": page_ids, "page_offsets": page_offsets, "new_k": k, "new_v": v}
    pools = {name: getattr(pages, name) for name in ("k", "v", "k_params", "v_params")}
    pools = {name: pool for name, pool in pools.items() if pool is not None}
    names = (*inputs, *pools, *("out_" + name for name in pools))
    written = pl.pallas_call(
        functools.partial(
            _kernel, names=names, config=config, num_rows=num_rows, k_bits=pages.k_bits, v_bits=pages.v_bits
        ),
        grid=(-(-num_rows // config.rows), pages.num_kv_heads),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools.values()],
        input_output_aliases={len(inputs) + n: n for n in range(len(pools))},
        compiler_params=backend.compiler_params(config.num_warps, 1),
        interpret=interpret,
        name="kv_write",
    )(*inputs.values(), *pools.values())
    return replace(pages, **dict(zip(pools, written, strict=True)))
