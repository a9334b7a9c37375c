"""Codes out of packed words, inside a kernel: inline assembly on the GPU, and its twin in plain JAX.

Both turn 16-bit words into code - zero, exact in bfloat16 and float16, without an integer conversion: or-ing a code
into the mantissa of a power of two gives that power plus the code, for two weights in one instruction.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend

# 128 + code in bfloat16 (7 mantissa bits), 1024 + code in float16 (10 bits), twice in 32 bits
_MAGIC = {"bfloat16": "0x43004300", "float16": "0x64006400"}
_MINUS_ONE = {"bfloat16": "0xBF80BF80", "float16": "0xBC00BC00"}
# What a zero point is shifted by, so that one subtraction serves; 8-bit codes leave bfloat16 no room: 128 + 255 rounds.
ZERO_BASE = {(4, "bfloat16"): 128, (4, "float16"): 1024, (8, "bfloat16"): 0, (8, "float16"): 1024}
_TYPE = {"bfloat16": "bf16x2", "float16": "f16x2"}


def _arithmetic(dtype: str) -> tuple[str, str]:
    """Instructions for {d} = {a} - {b} and {d} = {a} * {b} on pairs, rounded once.

    Below sm_90 pairs of bfloat16 have fma alone; on an H200 the fma of a difference costs the kernel 20 % at few rows.
    """
    kind = _TYPE[dtype]
    if dtype == "float16" or (backend.compute_capability() or backend.HOPPER) >= backend.HOPPER:
        return f"sub.rn.{kind} {{d}}, {{a}}, {{b}};", f"mul.rn.{kind} {{d}}, {{a}}, {{b}};"
    return f"fma.rn.{kind} {{d}}, {{b}}, minus_one, {{a}};", f"fma.rn.{kind} {{d}}, {{a}}, {{b}}, minus_zero;"


def assembly(bits: int, plane: int, dtype: str, num_scales: int) -> str:
    """$0 = two codes of plane `plane` of the words $1, minus the zeros $2 (from `zero_word`), times ($3 + $4)."""
    magic, (minus, times) = _MAGIC[dtype], _arithmetic(dtype)
    body = f"mov.b32 minus_one, {_MINUS_ONE[dtype]}; mov.b32 minus_zero, 0x80008000;"
    body += f"shr.u32 t, $1, {bits * plane};" if plane else "mov.b32 t, $1;"
    if bits == 8 and dtype == "bfloat16":  # 7 mantissa bits: low 7 bits, then -128 for the top bit, both exact
        body += f"lop3.b32 h, t, 0x00800080, {magic}, 0xEA; lop3.b32 t, t, 0x007F007F, {magic}, 0xEA;"
        body += f"mov.b32 m, {magic};" + minus.format(d="h", a="m", b="h")
        body += minus.format(d="t", a="t", b="m") + minus.format(d="t", a="t", b="h")
    else:
        body += f"lop3.b32 t, t, {'0x000F000F' if bits == 4 else '0x00FF00FF'}, {magic}, 0xEA;"
    body += minus.format(d="t" if num_scales else "$0", a="t", b="$2")
    if num_scales == 1:
        body += times.format(d="$0", a="t", b="$3")
    elif num_scales == 2:
        body += times.format(d="h", a="t", b="$4") + f"fma.rn.{_TYPE[dtype]} $0, t, $3, h;"
    return "{ .reg .b32 t, h, m, minus_one, minus_zero; " + body + " }"


def zero_word(zero: jax.Array, bits: int, dtype: jnp.dtype) -> jax.Array:
    """Integer zero points as `unpack_plane` takes them: base + zero in dtype (exact: up to 256 and 2048)."""
    return (zero.astype(jnp.float32) + ZERO_BASE[bits, jnp.dtype(dtype).name]).astype(dtype)


def scale_terms(scale: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
    """Scales as terms in dtype whose sum they are: rounding them to bfloat16 would cost as much as rounding weights."""
    if scale.dtype == dtype:
        return (scale,)
    wide = scale.astype(jnp.float32)
    kept_bits = jnp.int32(-1 << (16 if dtype == jnp.bfloat16 else 13))
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(wide, jnp.int32) & kept_bits, jnp.float32)
    return high.astype(dtype), (wide - high).astype(dtype)


def unpack_plane(
    words: jax.Array, zero: jax.Array, *scales: jax.Array, bits: int, plane: int, interpret: bool
) -> jax.Array:
    """Plane `plane` of the words as code - zero, exactly, or times the sum of scales, rounded to dtype.

    Args:
        words: uint16 [BN, W], code j of a word in bits j*bits ...
        zero: `zero_word` of the zero points, bfloat16 or float16 [BN, W]; its dtype is the result's.
        scales: `scale_terms` of the scales, [BN, W], or none.
        bits: 4 or 8.
        plane: 0 .. 16 / bits - 1.
        interpret: use plain JAX, since inline assembly has no interpreter.
    """
    dtype = zero.dtype
    if interpret:
        codes = (words >> (bits * plane)) & (2**bits - 1)
        values = codes.astype(jnp.float32) - (zero.astype(jnp.float32) - ZERO_BASE[bits, dtype.name])
        if scales:
            values = values * sum(scale.astype(jnp.float32) for scale in scales)
        return values.astype(dtype)
    args = [words, zero, *scales]
    [values] = backend.inline_asm(
        assembly(bits, plane, dtype.name, len(scales)),
        args=args,
        constraints="=r" + ",r" * len(args),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, dtype)],
    )
    return values
