"""The first kernel: what each chunk of a row holds, and a draw from it; one program a chunk."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.sampling.tiles import LOWEST, Row, SampleConfig, call, tile_of, whole, winner

SUMMARY = {"top": jnp.float32, "mass": jnp.float32, "best": jnp.float32, "pick": jnp.int32, "value": jnp.float32}


def draw_chunks(inputs: dict[str, jax.Array], config: SampleConfig, interpret: bool) -> dict[str, jax.Array]:
    """Summaries of the chunks of each row, [M, chunks], as if nothing were truncated.

    Args:
        inputs: logits, scale, is_hot, keys; and forbidden_ids where tokens may be forbidden.
        config: how the work is cut.
        interpret: run the kernel in the interpreter.

    Returns:
        top: float32, the largest scaled logit.
        mass: float32, sum of 2**(x - top); NaN where a logit is NaN or +inf.
        best: float32, the score of the chunk's draw: x + noise. In greedy rows the largest x.
        pick: int32, the token drawn; in greedy rows the first largest.
        value: float32, its scaled logit.
        logits: float32 [M, V], forbidden ones at -inf; changed in place where nothing else reads them.
    """
    num_rows, num_vocab = inputs["logits"].shape
    tile = tile_of(config.chunk_len, config.draw_warps)
    shape = (num_rows, -(-num_vocab // config.chunk_len))
    outputs = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in SUMMARY.items()}
    if can_forbid := "forbidden_ids" in inputs:
        outputs["masked"] = jax.ShapeDtypeStruct((num_rows, num_vocab), jnp.float32)
        inputs = inputs | {"is_masked": jnp.any(inputs["forbidden_ids"] >= 0, axis=-1).astype(jnp.int32)}

    def kernel(refs: dict[str, Any]) -> None:
        row, chunk = Row(refs, pl.program_id(0), num_vocab, tile, interpret), pl.program_id(1)
        x, index = row.read(chunk)
        if can_forbid:
            x = lax.cond(row.of("is_masked") > 0, lambda: forbid(row, chunk, x, index), lambda: x)
        top = jnp.maximum(whole(jnp.max, x), LOWEST)
        mass = whole(jnp.sum, row.exp2(x - top))
        score = lax.cond(row.of("is_hot") > 0, lambda: row.noisy(x, index), lambda: x)
        best, pick, value = winner(score, x, index)
        for name, found in zip(SUMMARY, (top, mass, best, pick, value), strict=True):
            refs[name][row.row, chunk] = found

    in_place = {"logits": "masked"} if can_forbid else {}
    found = call(kernel, "sample_draw", shape, inputs, outputs, config.draw_warps, interpret, in_place)
    return found | {"logits": found.pop("masked", inputs["logits"])}


def forbid(row: Row, chunk: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
    """Puts the row's forbidden tokens at -inf in a chunk, in registers and in memory; few rows have any."""
    start = chunk * row.chunk_len
    end = jnp.minimum(start + row.chunk_len, row.num_vocab)
    for slot in range(row.refs["forbidden_ids"].shape[1]):
        token = row.of("forbidden_ids", slot)
        x = jnp.where(index == token, -jnp.inf, x)
        where = row.refs["masked"].at[row.row, jnp.clip(token, 0, row.num_vocab - 1)]
        backend.masked_store(where, jnp.float32(-jnp.inf), mask=(token >= start) & (token < end))
    return x
