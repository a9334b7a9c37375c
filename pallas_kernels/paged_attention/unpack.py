"""Codes of KV words as float16, inside a kernel: inline assembly on the GPU, and its twin in plain JAX.

Or-ing a code into the mantissa of 1024 gives 1024 + code in float16, two codes an instruction and no integer
conversion. A code that sits four bits higher in its byte comes out 16 times as large, which spares its shift; callers
divide the query (or the result) of that plane by 16 instead, once. Keys keep the 1024: its share of a score is the
same for every key, and starts the accumulator. Values lose it here: their sum grows with the keys, and 1024 times it
would drown them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backend

BASE = 1024.0


def plane_factor(bits: int, plane: int) -> int:
    """What `unpack_plane` multiplies the codes of a plane by."""
    return 16 if bits == 4 and plane % 2 else 1


def _assembly(bits: int, plane: int, keep_base: bool) -> str:
    """$0 = two codes of the plane, one from each half of the words $1."""
    to = "$0" if keep_base else "t"
    if bits == 8 and plane:  # bytes 1 and 3 of the words, each below a byte 0x64
        body = f"prmt.b32 {to}, $1, 0x64, 0x4341;"
    else:
        mask = "0x00FF00FF" if bits == 8 else "0x00F000F0" if plane % 2 else "0x000F000F"
        shift = "shr.u32 t, $1, 8;" if bits * plane >= 8 else "mov.b32 t, $1;"
        body = f"{shift} lop3.b32 {to}, t, {mask}, 0x64006400, 0xEA;"
    minus = "" if keep_base else " mov.b32 m, 0x64006400; sub.rn.f16x2 $0, t, m;"
    return f"{{ .reg .b32 t, m; {body}{minus} }}"


def unpack_plane(words: jax.Array, *, bits: int, plane: int, keep_base: bool, interpret: bool) -> jax.Array:
    """float16 codes of a plane, times `plane_factor`, plus 1024 where `keep_base`; exact.

    Args:
        words: uint16 [T, W], code j of a word in bits j*bits ...
        bits: 8 or 4.
        plane: j, 0 .. 16 / bits - 1.
        keep_base: leave the 1024 in.
        interpret: use plain JAX, since inline assembly has no interpreter.
    """
    if interpret:
        value = _codes(words, bits, plane) * plane_factor(bits, plane)
        return (value + BASE if keep_base else value).astype(jnp.float16)
    return _run(_assembly(bits, plane, keep_base), words)


def dequantise_plane(
    words: jax.Array, scale: jax.Array, offset: jax.Array, *, bits: int, plane: int, interpret: bool
) -> jax.Array:
    """float16 code * scale + offset of a plane, rounded once.

    Args:
        words: uint16 [T, W].
        scale, offset: float16 [T, W].
        bits, plane, interpret: see `unpack_plane`.
    """
    if interpret:
        value = _codes(words, bits, plane) * scale.astype(jnp.float32) + offset.astype(jnp.float32)
        return value.astype(jnp.float16)
    mask = 0x00FF00FF if bits == 8 else 0x000F000F
    shift = f"shr.u32 t, $1, {bits * plane};" if plane else "mov.b32 t, $1;"
    assembly = (
        f"{{ .reg .b32 t, m; {shift} lop3.b32 t, t, {mask:#010x}, 0x64006400, 0xEA; mov.b32 m, 0x64006400;"
        " sub.rn.f16x2 t, t, m; fma.rn.f16x2 $0, t, $2, $3; }"
    )
    return _run(assembly, words, scale, offset)


def _codes(words: jax.Array, bits: int, plane: int) -> jax.Array:
    return ((words >> jnp.uint16(bits * plane)) & jnp.uint16(2**bits - 1)).astype(jnp.float32)


def _run(assembly: str, *args: jax.Array) -> jax.Array:
    [values] = backend.inline_asm(
        assembly,
        args=list(args),
        constraints="=r" + ",r" * len(args),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float16)],
    )
    return values
