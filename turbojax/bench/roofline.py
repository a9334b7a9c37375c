"""Bytes and FLOPs of a step, from the model's own arrays and spec, and the least time that a device needs for them.

A step is a chain of operations, each waiting for the one before; each takes at least the time of its bytes or of its
FLOPs, whichever is longer, and the step the sum of these. Of a model in shards it is the work of each device, and what
they exchange counts nothing. Weights (scales included), K and V count once; norms,
activations and sampling count nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.eight_bit_linear import EightBitWeights
from pallas_kernels.kv_cache import bytes_per_token
from turbojax.core.weights import Linear, Weights
from turbojax.models.spec import LayerSpec, LinearSpec, SegmentSpec
from turbojax.sharding import device_bytes

ROUNDS = 3


@dataclass(frozen=True)
class Rates:
    """What a device reaches: bytes/s of a read, FLOP/s of dots with 16-bit operands (of float32 ones on a CPU)."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Op:
    """One operation of a step, all layers together. `dot_speed`: its dots count as this many 16-bit ones a second."""

    name: str
    num_bytes: float
    num_flops: float
    dot_speed: int = 1

    def floor_s(self, rates: Rates) -> float:
        return max(self.num_bytes / rates.bytes_per_s, self.num_flops / rates.flops_per_s / self.dot_speed)


@dataclass(frozen=True)
class Work:
    """The operations of a step, or of several one after the other."""

    ops: tuple[Op, ...]

    @property
    def num_bytes(self) -> float:
        return sum(op.num_bytes for op in self.ops)

    @property
    def num_flops(self) -> float:
        return sum(op.num_flops for op in self.ops)

    def floor_s(self, rates: Rates) -> float:
        """Seconds that no implementation can beat."""
        return sum(op.floor_s(rates) for op in self.ops)

    def __add__(self, other: Work) -> Work:
        return Work(self.ops + other.ops)

    def __mul__(self, times: float) -> Work:
        """The same step several times."""
        scaled = [replace(op, num_bytes=op.num_bytes * times, num_flops=op.num_flops * times) for op in self.ops]
        return Work(tuple(scaled))


def decode_work(weights: Weights, lengths: Sequence[float]) -> Work:
    """One token for each sequence.

    Args:
        weights: the model; abstract leaves do.
        lengths: keys that each sequence sees.
    """
    kv = [kv_op(s, sum(visible(s.layer, n) for n in lengths), weights.spec.dtype) for s in weights.spec.segments]
    return Work((*linear_ops(weights, len(lengths)), *kv, head_op(weights, len(lengths))))


def prefill_work(weights: Weights, num_tokens: int) -> Work:
    """One prompt in one pass: every row through the layers, one row through the head."""
    attention = []
    for segment in weights.spec.segments:
        seen = int(visible(segment.layer, num_tokens))
        num_pairs = seen * (seen + 1) / 2 + (num_tokens - seen) * seen
        written = kv_op(segment, num_tokens, weights.spec.dtype)
        attention.append(replace(written, num_flops=pair_flops(segment) * num_pairs))
    return Work((*linear_ops(weights, num_tokens), *attention, head_op(weights, 1)))


def linear_ops(weights: Weights, num_rows: int) -> list[Op]:
    """The linears of all layers."""
    ops = []
    for segment, w in zip(weights.spec.segments, weights.segments, strict=True):
        layer = segment.layer
        named = {"qkv": (layer.qkv, w.qkv), "o": ((layer.o,), (w.o,)), "down": ((layer.down,), (w.down,))}
        named["gate_up"] = layer.gate_up, w.gate_up
        for name, (specs, linears) in named.items():
            pairs = zip(specs, linears, strict=True)
            ops += [linear_op(name, spec, linear, num_rows, segment.num_layers) for spec, linear in pairs]
    return ops


def linear_op(name: str, spec: LinearSpec, w: Linear, num_rows: int, num_layers: int = 1) -> Op:
    """A stack of linears, each read once."""
    num_flops = 2.0 * num_rows * spec.in_dim * spec.out_dim * num_layers
    return Op(name, device_bytes(w), num_flops, dot_speed=2 if isinstance(w.weight, EightBitWeights) else 1)


def head_op(weights: Weights, num_rows: int) -> Op:
    """The output projection; the embedding's table where they are tied."""
    spec = weights.spec
    return linear_op("head", spec.head or spec.embedding, weights.head or weights.embedding, num_rows)


def kv_op(segment: SegmentSpec, num_keys: float, dtype: str) -> Op:
    """Attention of one query row over each of these keys, all layers."""
    layer, itemsize = segment.layer, jnp.dtype(dtype).itemsize
    key_bytes = bytes_per_token(
        layer.num_kv_heads, layer.head_dim, k_bits=layer.k_bits, v_bits=layer.v_bits, itemsize=itemsize
    )
    return Op("attention", segment.num_layers * key_bytes * num_keys, pair_flops(segment) * num_keys)


def pair_flops(segment: SegmentSpec) -> float:
    """FLOPs of one query row against one key and its value, all layers: two dots of head dim in every query head."""
    return 4.0 * segment.num_layers * segment.layer.num_heads * segment.layer.head_dim


def visible(layer: LayerSpec, num_keys: float) -> float:
    """Keys within the layer's window."""
    return num_keys if layer.window is None else min(num_keys, layer.window)


def measure_rates() -> Rates:
    """The rates of the default device: a sum over 2.7 GB, and a square dot in bfloat16 (smaller, float32 on a CPU)."""
    gpu = backend.on_gpu()
    size, side, dtype, num_calls = (5 << 27, 8192, jnp.bfloat16, 10) if gpu else (1 << 24, 1024, jnp.float32, 2)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    data = jax.jit(lambda key: jax.random.uniform(key, (size,), jnp.float32))(keys[0])
    sums = jax.jit(jnp.sum), jax.jit(lambda x: x.reshape(-1, 4096).sum(axis=1))
    read_s = min(seconds_of(lambda f=f: f(data), num_calls) for f in sums)  # type: ignore[misc]  # a default binds early
    square = jax.random.normal(keys[1], (side, side), dtype)
    dot = jax.jit(lambda a: a @ a)
    return Rates(data.nbytes / read_s, 2.0 * side**3 / seconds_of(lambda: dot(square), num_calls))


def seconds_of(call: Callable[[], jax.Array], num_calls: int) -> float:
    """Seconds of a call: the best of a few rounds of calls queued behind one another."""
    jax.block_until_ready(call())
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(num_calls)])
        rounds.append((time.perf_counter() - start) / num_calls)
    return min(rounds)
