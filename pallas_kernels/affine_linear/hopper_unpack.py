"""Packed words in a warpgroup's registers to the left operand of its wgmma, without a move between threads.

A word is 16 bits wide, as bfloat16 and float16 are, so ldmatrix leaves the words of a tile [64, W] where wgmma wants
the elements of its left operand [64, W]: each plane is unpacked in place, register by register.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.affine_linear.unpack import assembly, zero_word

STRIP = 64  # rows of wgmma's left operand
ROWS = mosaic_gpu.Layout.WGMMA.reduce(1)
HAS_OLD_LOAD = jax.__version_info__ < (0, 11)  # `load` takes an index


def load(ref: Any, layout: Any, *, optimized: bool = False) -> jax.Array:
    """What a ref in shared memory holds, in a layout of a warpgroup's registers; `optimized` insists on ldmatrix."""
    index = ((),) if HAS_OLD_LOAD else ()
    return mosaic_gpu.load(ref, *index, layout=layout, optimized=optimized)


def spread(vector: jax.Array, width: int) -> jax.Array:
    """[64] -> [64, width], a value a row."""
    return lax.broadcast_in_dim(vector, (STRIP, width), [0])


def constant(value: float, width: int, dtype: jnp.dtype) -> jax.Array:
    """[64, width] of one value in wgmma's layout."""
    return mosaic_gpu.layout_cast(jnp.full((STRIP, width), value, dtype), mosaic_gpu.Layout.WGMMA)


def scale_terms(scale: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
    """Scales as terms in dtype whose sum they are, as `unpack.scale_terms`; Mosaic has no bitcast of registers."""
    if scale.dtype == dtype:
        return (scale,)
    wide = scale.astype(jnp.float32)
    high = wide.astype(dtype)
    return high, (wide - high.astype(jnp.float32)).astype(dtype)


def zeros_of_rows(zero: jax.Array, width: int, dtype: jnp.dtype) -> jax.Array:
    """Integer zero points [64] as `unpack_plane` takes them, [64, width]."""
    return spread(zero_word(zero, 4, dtype), width)


def unpack_plane(words: jax.Array, zero: jax.Array, *scales: jax.Array, plane: int) -> jax.Array:
    """Plane `plane` of 4-bit codes, minus the zero points, times the sum of the scales where there are any.

    Args:
        words: uint16 [64, W]; all arguments are in wgmma's layout.
        zero: bfloat16 or float16 [64, W], `zero_word` of the zero points; its dtype is the result's.
        scales: of the same shape and dtype.
        plane: 0 .. 3.
    """
    dtype, num_args = zero.dtype, 2 + len(scales)
    instructions = assembly(4, plane, dtype.name, len(scales))
    layout = mosaic_gpu.Layout.WGMMA

    @mosaic_gpu.inline_mgpu(
        arg_types=(layout,) * num_args,
        return_type=mosaic_gpu.ShapeDtypeStruct(words.shape, dtype, layout=layout),
    )
    def in_place(_: Any, *args: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get())
        registers = np.empty(args[0].registers.shape, dtype=object)
        for index in np.ndindex(registers.shape):
            operands = [llvm.bitcast(i32, arg.registers[index]) for arg in args]
            codes: Any = llvm.inline_asm(i32, operands, instructions, "=r" + ",r" * num_args)
            registers[index] = llvm.bitcast(pair, codes)
        return mosaic.FragmentedArray(_registers=registers, _layout=args[0].layout, _is_signed=None)

    return in_place(words, zero, *scales)
