"""Every variant of the kernels lowers for CUDA, on a machine without a GPU."""

import contextlib
import math

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import backend
from pallas_kernels.kv_cache import empty_pages, write_kv
from pallas_kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from pallas_kernels.paged_attention.decode_kernel import DecodeConfig, decode_attention
from pallas_kernels.paged_attention.tiles import ScoreFunction
from pallas_kernels.paged_attention.tuning import MAX_PREFILL_RANGES, prefill_config, prefill_ranges
from tests.kernels.attention.cases import CASES, Case

DEVICES = ["NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3", "NVIDIA B200"]


def on(kind):
    """Lowering for a device that is not there; JAX 0.10 lowers for CUDA without naming one."""
    sharding = jax.sharding
    if not hasattr(sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    return sharding.use_abstract_mesh(sharding.AbstractMesh((), (), abstract_device=device))


def lower(kind, function, *args):
    """The number of Triton kernels in the lowered module."""
    with on(kind):
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("__gpu$xla.gpu.triton") or text.count("triton_kernel_call")


def shapes(case: Case, rows: int, tables: int, page_len: int = 64):
    pages = jax.eval_shape(
        lambda: empty_pages(2, 70000, case.kv_heads, page_len, case.head_dim, k_bits=case.k_bits, v_bits=case.v_bits,
                            dtype=jnp.bfloat16)
    )  # fmt: skip
    q = jax.ShapeDtypeStruct((rows, case.kv_heads * case.group, case.head_dim), jnp.bfloat16)
    int32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    return q, pages, int32, int32(tables, 40)


@pytest.mark.parametrize(
    ("kind", "case"),
    [*((DEVICES[n % 4], case) for n, case in enumerate(CASES)), *((kind, CASES[3]) for kind in DEVICES[:3])],
    ids=str,
)
def test_public_functions(kind, case):
    """Every case on one device, and one case on every device: devices differ in how the work is cut."""
    q, pages, int32, tables = shapes(case, 24, 24)
    options = case.options() | {"implementation": "triton"}
    assert lower(kind, lambda *a: paged_decode_attention(*a, **options), q, pages, int32(), tables, int32(24)) == 2
    _, _, _, tables = shapes(case, 24, 3)
    found = lower(
        kind, lambda *a: paged_prefill_attention(*a, **options), q, pages, int32(), tables, int32(4), int32(3)
    )
    # Ranges and their merge, since 24 rows fill no GPU, behind a copy of quantised pages.
    assert found == (2 if (case.k_bits, case.v_bits) == (16, 16) else 3)
    rows = jax.ShapeDtypeStruct((24, case.kv_heads, case.head_dim), jnp.bfloat16)
    write = lambda *a: write_kv(*a, implementation="triton")
    assert lower(kind, write, pages, rows, rows, int32(), int32(24), int32(24)) == 1


@pytest.mark.parametrize("config", [DecodeConfig(64, 1, 2, 3), DecodeConfig(4096, 2, 2, 5), DecodeConfig(512, 1, 4, 4)])
@pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
def test_decode_cuts(bits, config):
    q, pages, int32, tables = shapes(Case(128, 4, *bits, kv_heads=8), 24, 24)
    function = ScoreFunction(0.1, None, None)
    args = (q, pages, int32(), tables, int32(24))
    found = lower(DEVICES[2], lambda *a: decode_attention(*a, function, None, config, False), *args)
    assert found == (1 if config.range_len == 4096 else 2)


def test_prefill_of_many_rows_is_not_cut():
    q, pages, int32, tables = shapes(CASES[0], 1 << 14, 1)
    args = (q, pages, int32(), tables, int32(2), int32(1))
    options = CASES[0].options() | {"implementation": "triton"}
    assert lower(DEVICES[2], lambda *a: paged_prefill_attention(*a, **options), *args) == 1


def test_ranges_of_prefill_fill_the_places_that_tiles_leave():
    """Of 264 places. Tiles that fill most of them stay whole: more programs write more partial results."""
    for tiles in range(1, 4000):
        ranges = prefill_ranges(tiles)
        assert 1 <= ranges <= MAX_PREFILL_RANGES
        waves = tiles / 264
        assert math.ceil(waves * ranges) / ranges <= math.ceil(waves)
        if tiles <= 132:
            assert waves * ranges > 0.7 or ranges == MAX_PREFILL_RANGES
        if tiles > 2112:
            assert ranges == 1
    assert prefill_ranges(224) == 1


@pytest.mark.parametrize(
    ("kind", "head_dim", "stages"), [(0, 256, 2), (1, 128, 2), (1, 256, 1), (2, 256, 3), (3, 128, 3)]
)
def test_load_stages_fit_into_shared_memory(kind, head_dim, stages, monkeypatch):
    """163 KiB on an A100, 99 on an RTX 4090, 227 on an H100 or B200."""
    monkeypatch.setattr(backend, "compute_capability", lambda: [(8, 0), (8, 9), (9, 0), (10, 0)][kind])
    q, pages, _, _ = shapes(Case(head_dim, 2), 64, 1)
    assert prefill_config(q, pages).num_stages == stages


def test_old_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(backend, "compute_capability", lambda: (7, 5))
    q, pages, int32, tables = shapes(CASES[0], 24, 24)
    with pytest.raises(ValueError, match=r"compute capability 7\.5 is below 8\.0"):
        jax.eval_shape(
            lambda *a: paged_decode_attention(*a, scale=1.0, implementation="triton"),
            q, pages, int32(), tables, int32(24),
        )  # fmt: skip
