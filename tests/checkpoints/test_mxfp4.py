"""MXFP4 blocks by the format's definition: a sign, two exponent bits, one mantissa bit, times a power of two."""

import ml_dtypes
import numpy as np
import pytest

from checkpoints import (
    CorruptFileError,
    DenseFormat,
    MissingTensorError,
    ShapeMismatchError,
    UnsupportedFormatError,
    open_checkpoint,
)
from tests.checkpoints.layouts import folder

MXFP4 = {"quant_method": "mxfp4"}
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def blocks(*lead, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (*lead, 16), dtype=np.uint8), rng.integers(100, 150, lead, dtype=np.uint8)


@pytest.mark.parametrize("lead", [(2, 5, 3), (5, 3)], ids=["experts", "a matrix"])
def test_values_are_exact_in_bfloat16(tmp_path, lead, caplog):
    codes, exponents = blocks(*lead)
    bias = np.ones(lead[:-1], np.float32)
    tensors = {"e.down_proj_blocks": codes, "e.down_proj_scales": exponents, "e.down_proj_bias": bias}
    checkpoint = open_checkpoint(folder(tmp_path / "m", tensors, MXFP4))
    assert set(checkpoint.tensors) == {"e.down_proj", "e.down_proj_bias"}
    assert "1 tensors of MXFP4 become bfloat16" in caplog.text
    info, value = checkpoint.tensors["e.down_proj"], checkpoint.read("e.down_proj")
    assert (info.shape, info.format) == ((*lead[:-1], 96), DenseFormat("bfloat16")) == (value.shape, info.format)
    want = np.empty((*lead, 32))
    want[..., 0::2], want[..., 1::2] = E2M1[codes % 16], E2M1[codes // 16]  # low nibble first
    want *= 2.0 ** (exponents.astype(np.float64) - 127)[..., None]
    np.testing.assert_array_equal(value.astype(np.float64), want.reshape(value.shape))


@pytest.mark.parametrize(("exponent", "largest"), [(0, 6 * 2.0**-127), (252, 6 * 2.0**125)])
def test_the_ends_of_the_range(tmp_path, exponent, largest):
    codes, exponents = np.full((1, 1, 16), 0x77, np.uint8), np.full((1, 1), exponent, np.uint8)
    checkpoint = open_checkpoint(folder(tmp_path / "m", {"a_blocks": codes, "a_scales": exponents}, MXFP4))
    checkpoint.check()
    np.testing.assert_array_equal(checkpoint.read("a").astype(np.float64), largest)


def test_an_exponent_past_the_range_is_found_before_blocks_are_read(tmp_path):
    codes, exponents = blocks(5, 3)
    exponents[1, 1] = 255  # not a number
    path = folder(tmp_path / "m", {"a_blocks": codes, "a_scales": exponents}, MXFP4)
    with pytest.raises(CorruptFileError, match=r"'a_scales'.*exponent 255"):
        open_checkpoint(path).check()


@pytest.mark.parametrize(
    ("tensors", "error", "names"),
    [
        ({"a_blocks": blocks(5, 3)[0]}, MissingTensorError, "'a_scales'"),
        (
            {"a_blocks": blocks(5, 3)[0], "a_scales": blocks(5, 2)[1]},
            ShapeMismatchError,
            r"'a_scales'.*\[5, 2\].*\[5, 3\]",
        ),
        ({"a_blocks": blocks(5)[0], "a_scales": blocks(5)[1]}, UnsupportedFormatError, r"'a_blocks'.*\[5, 16\]"),
        ({"a.weight": np.ones((2, 2), np.float32)}, UnsupportedFormatError, "_blocks"),
    ],
)
def test_arrays_that_do_not_belong_together(tmp_path, tensors, error, names):
    with pytest.raises(error, match=names):
        open_checkpoint(folder(tmp_path / "m", tensors, MXFP4))
