"""Grids: fitted and applied as their equation says, alike on the host and in a jitted search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from turbojax.lite.grid import Grid, affine_tensor, codes_of, fit, rounded, snapped

GRIDS = [Grid(bits, group, symmetric) for bits in (4, 8) for group in (32, 64) for symmetric in (False, True)]
WEIGHTS = arrays(np.float32, (3, 80), elements=st.floats(-8, 8, width=32))


def by_hand(w, grid):
    """Codes, scale and offset of each weight, one group at a time in float64."""
    codes, scales, offsets = np.empty_like(w), np.empty_like(w), np.empty_like(w)
    top = 2**grid.bits - 1
    for row in range(len(w)):
        for start in range(0, w.shape[1], grid.group_size):
            at = slice(start, start + grid.group_size)
            x = w[row, at].astype(np.float64)
            low, high = min(x.min(), 0), max(x.max(), 0)
            if grid.symmetric:
                high = max(-x.min(), x.max())
                low = -high
            scale = float(np.float16(np.float32((high - low) / top))) or 1.0
            zero = 2 ** (grid.bits - 1) if grid.symmetric else np.clip(np.round(-low / scale), 0, top)
            codes[row, at] = np.clip(np.round(x / scale + zero), 0, top)
            scales[row, at], offsets[row, at] = scale, -zero * scale
    return codes, scales, offsets


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_weights_are_rounded_as_by_hand(grid):
    w = np.random.default_rng(0).standard_normal((16, 200)).astype(np.float32)
    codes, scales, offsets = by_hand(w, grid)
    tensor = rounded(w, grid)
    tensor.check()
    assert np.mean(codes != tensor.codes.T) < 2e-3  # ties and their neighbours: float32 against float64
    np.testing.assert_allclose(tensor.dequantize().T, tensor.codes.T * scales + offsets, rtol=0, atol=1e-6)


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(8, 64, True), Grid(4, 32, float_offset=True)], ids=str)
@settings(max_examples=30)
@given(w=WEIGHTS)
def test_nothing_is_further_off_than_its_step_allows(grid, w):
    """Half a step; a whole one at the upper end of symmetric codes, or where the zero point was rounded."""
    scale, _ = fit(w, grid)
    step = scale.repeat(grid.group_size, 1)[:, : w.shape[1]]
    span = np.abs(w).max() * 2**-10  # the scale is rounded to float16
    assert (np.abs(snapped(w, grid) - w) <= step * (0.501 if grid.float_offset else 1.01) + span).all()


@pytest.mark.parametrize("grid", [Grid(4, 64, min_zero=1), Grid(8, 32, True), Grid(4, 32, float_offset=True)], ids=str)
def test_device_and_host_agree(grid):
    w = np.random.default_rng(1).standard_normal((8, 96)).astype(np.float32)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(snapped, static_argnums=1)(jnp.asarray(w), grid)), snapped(w, grid)
    )


def test_a_float_offset_gives_back_what_lies_on_such_a_grid():
    """Scale and smallest value are float16, as GGUF's Q4_1 stores them."""
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (8, 96)).astype(np.float32)
    codes[:, ::32], codes[:, 1::32] = 0, 15  # every group spans its grid
    scale = np.abs(rng.standard_normal((8, 3))).astype(np.float16).astype(np.float32).repeat(32, 1)
    low = rng.standard_normal((8, 3)).astype(np.float16).astype(np.float32).repeat(32, 1)
    w = codes * scale + low
    grid = Grid(4, 32, float_offset=True)
    tensor = rounded(w, grid)
    np.testing.assert_array_equal(tensor.codes.T, codes)
    np.testing.assert_array_equal(tensor.dequantize().T, w)


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(4, 32, symmetric=True), Grid(4, 32, float_offset=True)], ids=str)
@pytest.mark.parametrize("value", [0.0, 3.5, -2.0])
def test_a_constant_group_stays_what_it_is(grid, value):
    w = np.full((2, 40), value, np.float32)
    np.testing.assert_allclose(rounded(w, grid).dequantize().T, w, rtol=0.07 if grid.symmetric else 1e-3)


def test_no_zero_point_is_below_what_the_file_holds():
    w = np.abs(np.random.default_rng(3).standard_normal((4, 64))).astype(np.float32)
    scale, offset = fit(w, Grid(4, 32, min_zero=1))
    assert (np.rint(-offset / scale) == 1).all()
    assert (codes_of(w, scale, offset, Grid(4, 32, min_zero=1)) >= 1).all()


def test_a_symmetric_tensor_has_no_offset():
    grid = Grid(4, 32, symmetric=True)
    w = np.random.default_rng(4).standard_normal((4, 64)).astype(np.float32)
    scale, offset = fit(w, grid)
    tensor = affine_tensor(codes_of(w, scale, offset, grid), scale, offset, grid)
    assert tensor.offset is None
    np.testing.assert_array_equal(tensor.dequantize().T, snapped(w, grid))
