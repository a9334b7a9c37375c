"""Codes out of packed words, inside a kernel: inline assembly on the GPU, and its twin in plain JAX.

Both turn 16-bit words into code - zero, exact in bfloat16 and float16, without an integer conversion: or-ing a code
into the mantissa of a power of two gives that power plus the code, for two weights in one instruction.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backend

# 128 + code in bfloat16 (7 mantissa bits), 1024 + code in float16 (10 bits), twice in 32 bits
_MAGIC = {"bfloat16": "0x43004300", "float16": "0x64006400"}
# What a zero point is shifted by, so that one subtraction serves; 8-bit codes leave bfloat16 no room: 128 + 255 rounds.
_BASE = {(4, "bfloat16"): 128, (4, "float16"): 1024, (8, "bfloat16"): 0, (8, "float16"): 1024}
_TYPE = {"bfloat16": "bf16x2", "float16": "f16x2"}


def _assembly(bits: int, plane: int, dtype: str) -> str:
    """$0 = two codes of plane `plane` of the words $1, minus the zeros $2 (from `zero_word`)."""
    magic, kind = _MAGIC[dtype], _TYPE[dtype]
    shift = f"shr.u32 t, $1, {bits * plane};" if plane else "mov.b32 t, $1;"
    if bits == 8 and dtype == "bfloat16":  # 7 mantissa bits: low 7 bits, then 128 for the top bit, both exact
        body = (
            f"lop3.b32 h, t, 0x00800080, {magic}, 0xEA; lop3.b32 t, t, 0x007F007F, {magic}, 0xEA;"
            f"mov.b32 m, {magic}; sub.rn.{kind} t, t, m; sub.rn.{kind} h, h, m;"
            f"add.rn.{kind} t, t, h; sub.rn.{kind} $0, t, $2;"
        )
    else:
        mask = "0x000F000F" if bits == 4 else "0x00FF00FF"
        body = f"lop3.b32 t, t, {mask}, {magic}, 0xEA; sub.rn.{kind} $0, t, $2;"
    return "{ .reg .b32 t, h, m; " + shift + body + " }"


def zero_word(zero: jax.Array, bits: int, dtype: jnp.dtype) -> jax.Array:
    """Integer zero points as `unpack_plane` takes them: base + zero in dtype (exact: up to 256 and 2048)."""
    return (zero.astype(jnp.float32) + _BASE[bits, jnp.dtype(dtype).name]).astype(dtype)


def unpack_plane(words: jax.Array, zero: jax.Array, *, bits: int, plane: int, interpret: bool) -> jax.Array:
    """Plane `plane` of the words as code - zero.

    Args:
        words: uint16 [BN, W], code j of a word in bits j*bits ...
        zero: `zero_word` of the zero points, bfloat16 or float16 [BN, W]; its dtype is the result's.
        bits: 4 or 8.
        plane: 0 .. 16 / bits - 1.
        interpret: use plain JAX, since inline assembly has no interpreter.
    """
    if interpret:
        codes = (words >> (bits * plane)) & (2**bits - 1)
        zero_point = zero.astype(jnp.float32) - _BASE[bits, zero.dtype.name]
        return (codes.astype(jnp.float32) - zero_point).astype(zero.dtype)
    [values] = backend.inline_asm(
        _assembly(bits, plane, str(zero.dtype)),
        args=[words, zero],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, zero.dtype)],
    )
    return values
