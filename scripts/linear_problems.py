"""What `bench_linear` times: shapes, numbers of rows, random weights and the floors under their times."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from kernel_times import Case, Maker

from pallas_kernels import eight_bit_linear as eight_bit
from pallas_kernels.affine_linear import PackedAffine, affine_linear, tuning
from pallas_kernels.eight_bit_linear import tuning as eight_bit_tuning
from pallas_kernels.linears import to_entry

ROTATED_BYTES = 300e6  # five times an H200's L2
SHAPES = ((4096, 4096), (4096, 6144), (4096, 28672), (14336, 4096), (8192, 8192), (8192, 57344))
FEW_ROWS, MANY_ROWS = (1, 8, 16, 32, 64), (128, 256, 1024, 4096)
EXTRA_ROWS = (1, 16, 64)
EXTRA = (  # K, N, group size, bits
    (576, 576, 32, 4),
    (576, 1536, 32, 4),
    (576, 49152, 32, 8),
    (1000, 1234, 32, 4),
    (4096, 28672, 128, 8),
)
EIGHT_BIT_SHAPES, EIGHT_BIT_ROWS = ((4096, 28672), (14336, 4096)), (16, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class Linear:
    """A linear to time at several numbers of rows.

    Attributes:
        name: of its format, "W4A16".
        op: the public function's name.
        K, N: its shape.
        rows: numbers of rows.
        weights: makes a stack of layers.
        call: (x, weights, layer) -> y.
        layer_bytes: of one layer.
        dot_speed: of its dots, in bf16 dots.
        choice: rows -> how the op runs them, for the results.
        fields: what else its result rows say.
    """

    name: str
    op: str
    K: int
    N: int
    rows: Sequence[int]
    weights: Maker
    call: Callable[[jax.Array, Any, jax.Array], jax.Array]
    layer_bytes: float
    dot_speed: int
    choice: Callable[[int], dict[str, Any]]
    fields: dict[str, Any]

    def tag(self, M: int) -> str:
        return f"{self.name} K{self.K} N{self.N} M{M}"

    def cases(self) -> list[Case]:
        """One for each number of rows."""
        layers = jax.tree.leaves(jax.eval_shape(self.weights))[0].shape[0]
        arguments = lambda layer, x, w: (x, w, jnp.int32(layer))  # noqa: E731
        return [
            Case(self.tag(M), self.call, layers, (random_rows(M, self.K), self.weights), arguments) for M in self.rows
        ]

    def floor_us(self, M: int, read_rate: float, dot_rate: float) -> float:
        """Microseconds that no kernel can beat: weights and scales read once, x read, y written; or the FLOPs."""
        moved_bytes = self.layer_bytes + 2 * M * (self.K + self.N)
        return max(moved_bytes / read_rate, 2 * M * self.K * self.N / dot_rate / self.dot_speed) * 1e6


@functools.cache
def random_rows(M: int, K: int) -> Maker:
    return lambda: jax.random.normal(jax.random.key(1), (M, K), jnp.bfloat16)


def random_weights(K: int, N: int, group_size: int, bits: int, kind: str = "symmetric") -> PackedAffine:
    """Random words and scales, enough layers for `ROTATED_BYTES`."""
    width = 64 if K % (64 * 16 // bits) == 0 and group_size != 32 else 32
    tile, padded = width * 16 // bits, -(-N // 64) * 64
    layers = max(2, math.ceil(ROTATED_BYTES / (K * N * bits / 8)))
    keys = jax.random.split(jax.random.key(0), 3)
    tiles = -(-K // tile)
    groups = (layers, 1 if group_size == -1 else -(-tiles * tile // group_size), padded)
    words = jax.random.bits(keys[0], (layers, tiles, padded, width), jnp.uint16)
    scale = (jax.random.uniform(keys[1], groups) * 0.02 + 0.001).astype(jnp.float16)
    shift = jax.random.randint(keys[2], groups, 0, 2**bits).astype(jnp.uint8) if kind == "zero" else None
    return PackedAffine(words, scale, shift, None, kind, bits, K if group_size == -1 else group_size, K, N)


def affine(K: int, N: int, group_size: int, bits: int, rows: Sequence[int]) -> Linear:
    """W4A16 or W8A16."""
    make = functools.partial(random_weights, K, N, group_size, bits)
    w = jax.eval_shape(make)
    layer_bytes = K * N * bits / 8 + -(-w.K // w.group_size) * N * w.scale.dtype.itemsize
    return Linear(
        f"W{bits}A16", "affine_linear", K, N, rows, make, affine_linear, layer_bytes, 1,
        lambda M: to_entry(tuning.choose(M, w.layout, w.N, w.words.shape[2]), tuning.PATHS),
        {"bits": bits, "group_size": group_size},
    )  # fmt: skip


def random_eight_bit(K: int, N: int, name: str) -> eight_bit.EightBitWeights:
    layers = max(2, math.ceil(ROTATED_BYTES / (K * N)))
    keys = jax.random.split(jax.random.key(0), 2)
    if name == "W8A8":
        codes = jax.random.randint(keys[0], (layers, N, K), -127, 128, jnp.int8)
    else:
        codes = jnp.clip(100 * jax.random.normal(keys[0], (layers, N, K), jnp.bfloat16), -448, 448)
        codes = codes.astype(jnp.float8_e4m3fn)
    covers = {"W8A8": (N,), "FP8 tensor": (), "FP8 blocks": (-(-N // 128), -(-K // 128))}[name]
    return eight_bit.eight_bit_weights(codes, jax.random.uniform(keys[1], (layers, *covers)) * 0.001 + 0.0005)


def eight_bit_linear(K: int, N: int, name: str, rows: Sequence[int]) -> Linear:
    """W8A8 or FP8 with one scale for all or for each block."""
    make = functools.partial(random_eight_bit, K, N, name)
    w = jax.eval_shape(make)
    return Linear(
        name, "eight_bit_linear", K, N, rows, make, eight_bit.eight_bit_linear, K * N + 4 * w.scale.size / len(w.scale),
        2, lambda M: to_entry(eight_bit_tuning.choose(M, w), eight_bit_tuning.PATHS), {"bits": 8},
    )  # fmt: skip


@functools.cache
def bf16_layers(A: int, B: int) -> Maker:
    """Separate bfloat16 [A, B]: XLA copies a layer out of a stack before it multiplies."""
    num_layers = max(2, math.ceil(ROTATED_BYTES / (2 * A * B)))
    return lambda: list(jax.random.normal(jax.random.key(2), (num_layers, A, B), jnp.bfloat16))


def bf16_cases(M: int, K: int, N: int) -> list[Case]:
    """XLA's dot with bf16 weights in both layouts."""
    kn, nk, x = bf16_layers(K, N), bf16_layers(N, K), random_rows(M, K)
    num_layers = len(jax.eval_shape(kn))
    arguments = lambda layer, x, layers: (x, layers[layer])  # noqa: E731
    dot_nk = lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ())))  # noqa: E731
    return [
        Case(("bf16 KN", M, K, N), jnp.matmul, num_layers, (x, kn), arguments),
        Case(("bf16 NK", M, K, N), dot_nk, num_layers, (x, nk), arguments),
    ]


def linears(only: Sequence[str], rows: Sequence[int] = ()) -> Iterator[Linear]:
    """The linears to time at those of their rows that are wanted; `only` and `rows` want all where they are empty."""
    for linear in _all_linears(only):
        wanted = [M for M in linear.rows if not rows or M in rows]
        if wanted:
            yield replace(linear, rows=wanted)


def _all_linears(only: Sequence[str]) -> Iterator[Linear]:
    """Those whose names begin with one of `only`, if it names any."""

    def wanted(name: str) -> bool:
        return not only or name.startswith(tuple(only))

    if wanted("W4A16"):
        for rows in (FEW_ROWS, MANY_ROWS):
            for K, N in SHAPES:
                yield affine(K, N, 128, 4, rows)
    for K, N in EIGHT_BIT_SHAPES:
        for name in filter(wanted, ("W8A8", "FP8 tensor", "FP8 blocks")):
            yield eight_bit_linear(K, N, name, EIGHT_BIT_ROWS)
    for K, N, group_size, bits in EXTRA:
        if wanted(f"W{bits}A16"):
            yield affine(K, N, group_size, bits, EXTRA_ROWS)
