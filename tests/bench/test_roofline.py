"""Bytes, FLOPs and floors against sums done by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.eight_bit_linear import EightBitWeights
from turbojax.bench.roofline import Op, Rates, Work, decode_work, linear_op, measure_rates, prefill_work
from turbojax.core.weights import Linear
from turbojax.models import random_model as rm
from turbojax.models.abstract import abstract_weights, leaf
from turbojax.models.families import architecture_of
from turbojax.models.planning import plan_model
from turbojax.models.shapes import shape_config
from turbojax.models.spec import LinearSpec

# tiny: 2 layers of qkv 128 x 256, o 128 x 128, gate_up 128 x 512, down 256 x 128, 4 heads of 32 over 2 kv heads.
TINY_LINEARS = 2 * (128 * 256 + 128 * 128 + 128 * 512 + 256 * 128)
TINY_HEAD = 512 * 128
TINY_KV8_BYTES = 2 * 2 * 2 * (32 + 4)


def abstract(shape, weight_format="bf16", kv=8):
    config = dict(shape_config(shape))
    arch = architecture_of(config)
    headers = rm.described_checkpoint(shape, config, arch, rm.WEIGHT_FORMATS[weight_format])
    return abstract_weights(plan_model(headers, arch, "bfloat16", lambda layer: (kv, kv)))


def packed(weights):
    """The linears of the layers as a GPU holds them."""
    pack = lambda w: replace(w, weight=rm.packed_form(w.weight))
    layers = weights.segments[0]
    layers = replace(
        layers, qkv=(pack(layers.qkv[0]),), o=pack(layers.o), gate_up=(pack(layers.gate_up[0]),), down=pack(layers.down)
    )
    return replace(weights, segments=(layers,))


def test_a_decode_step_of_the_tiny_shape():
    work = decode_work(abstract("tiny"), [10, 20])
    assert work.num_bytes == 2 * (TINY_LINEARS + TINY_HEAD) + 30 * TINY_KV8_BYTES
    assert work.num_flops == 2 * 2 * (TINY_LINEARS + TINY_HEAD) + 2 * 2 * (2 * 4 * 32) * 30


def test_a_prompt_of_the_tiny_shape():
    work = prefill_work(abstract("tiny"), 5)
    assert work.num_bytes == 2 * (TINY_LINEARS + TINY_HEAD) + 5 * TINY_KV8_BYTES
    assert work.num_flops == 2 * 5 * TINY_LINEARS + 2 * TINY_HEAD + 2 * 2 * (2 * 4 * 32) * (1 + 2 + 3 + 4 + 5)


def test_a_window_bounds_what_a_row_sees():
    weights = abstract("tiny")
    segment = weights.spec.segments[0]
    windowed = replace(segment, layer=replace(segment.layer, window=3))
    weights = replace(weights, spec=replace(weights.spec, segments=(windowed,)))
    attention = {op.name: op for op in decode_work(weights, [2, 20]).ops}["attention"]
    assert attention.num_bytes == 5 * TINY_KV8_BYTES
    attention = {op.name: op for op in prefill_work(weights, 5).ops}["attention"]
    assert attention.num_flops == 2 * 2 * (2 * 4 * 32) * (1 + 2 + 3 + 3 + 3)


def test_a_tied_head_reads_the_embedding():
    weights = abstract("tiny")
    tied = replace(weights, head=None, spec=replace(weights.spec, head=None))
    assert decode_work(tied, [10]) == decode_work(weights, [10])


def test_dots_of_eight_bits_count_at_twice_the_rate():
    codes = EightBitWeights(leaf((1, 64, 32), jnp.int8), leaf((1, 64, 1), jnp.float32))
    op = linear_op("o", LinearSpec(32, 64), Linear(codes), num_rows=1000)
    assert (op.num_bytes, op.num_flops) == (64 * 32 + 4 * 64, 2 * 1000 * 64 * 32)
    assert op.floor_s(Rates(1e30, 1e6)) == pytest.approx(op.num_flops / 2e6)


def test_a_floor_is_the_sum_of_what_bounds_each_operation():
    rates = Rates(bytes_per_s=10, flops_per_s=100)
    work = Work((Op("read", 50, 1), Op("dot", 1, 300)))
    assert work.floor_s(rates) == 5 + 3
    assert (work * 2 + work).floor_s(rates) == pytest.approx(3 * 8)


@pytest.mark.parametrize(
    ("batch", "context", "kv", "floor_ms"),
    # Linears of 6.98e9 weights at 0.516 bytes each or 2 FLOP a row, a head of 1.05 GB, 2 * 8 * 32 * (128 * kv/8 + 4)
    # bytes of K and V a token, at 4.3 TB/s and 790 TFLOP/s.
    [(1, 1024, 8, 1.10), (64, 4096, 8, 5.50), (64, 4096, 4, 3.50), (256, 1024, 8, 8.98)],
)
def test_a_decode_step_of_llama(batch, context, kv, floor_ms):
    work = decode_work(packed(abstract("llama-3.1-8b", "w4", kv)), [context] * batch)
    assert 1e3 * work.floor_s(Rates(4.3e12, 790e12)) == pytest.approx(floor_ms, rel=0.01)


def test_a_prompt_of_llama():
    # 114 TFLOP of linears and 18 of causal attention.
    floor_s = prefill_work(packed(abstract("llama-3.1-8b", "w4")), 8192).floor_s(Rates(4.3e12, 790e12))
    assert 1e3 * floor_s == pytest.approx(167, rel=0.01)


def test_rates_are_those_of_a_real_device():
    rates = measure_rates()
    assert jax.default_backend() == "cpu"
    assert 1e8 < rates.bytes_per_s < 1e13
    assert 1e8 < rates.flops_per_s < 1e16
