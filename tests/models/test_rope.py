"""RoPE frequencies against the published formulas in float64, and the rotation against complex numbers."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rope_write import apply_rope
from turbojax.errors import ModelConfigError
from turbojax.models.rope import rope_angles, row_inv_freq
from turbojax.models.rope_config import rope_from_config

BASE = {"max_position_embeddings": 64, "rope_theta": 10000.0}
HEAD_DIM = 16
PLAIN = np.array([10000.0 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)])


def freq(config, admitted_len=1):
    spec = rope_from_config(BASE | config, HEAD_DIM)
    return np.asarray(row_inv_freq(spec, jnp.asarray([admitted_len], jnp.int32))[0], np.float64), spec


@pytest.mark.parametrize(
    "keys", [("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")]
)
def test_linear_scaling_in_every_spelling(keys):
    outer, inner = keys
    got, _ = freq({outer: {inner: "linear", "factor": 4.0}})
    np.testing.assert_allclose(got, PLAIN / 4, rtol=1e-6)


def test_theta_is_read_from_rope_parameters_too():
    got, _ = freq({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    np.testing.assert_allclose(got, [500.0 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)], rtol=1e-6)


@pytest.mark.parametrize("length", [1, 64, 65, 100, 640])
def test_dynamic_ntk_follows_the_admitted_length(length):
    got, _ = freq({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, length)
    seq = max(length, 64)
    base = 10000.0 * (2.0 * seq / 64 - 1.0) ** (HEAD_DIM / (HEAD_DIM - 2))
    np.testing.assert_allclose(got, [base ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)], rtol=1e-5)


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    got, _ = freq({"rope_scaling": scaling})
    expected = []
    for f in PLAIN:
        wavelength = 2 * math.pi / f
        if wavelength < 64 / 4.0:
            expected.append(f)
        elif wavelength > 64 / 1.0:
            expected.append(f / 8)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * f / 8 + smooth * f)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_yarn_attention_factor_and_its_overrides():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert freq({"rope_scaling": yarn})[1].attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert freq({"rope_scaling": yarn | {"attention_factor": 1.5}})[1].attention_factor == 1.5
    got = freq({"rope_scaling": yarn | {"mscale": 0.7, "mscale_all_dim": 1.4}})[1].attention_factor
    assert got == pytest.approx((0.07 * math.log(4) + 1) / (0.14 * math.log(4) + 1))


def test_longrope_picks_its_factors_by_the_admitted_length():
    half = HEAD_DIM // 2
    scaling = {"type": "longrope", "short_factor": [1.0] * half, "long_factor": [float(i + 2) for i in range(half)]}
    config = {"rope_scaling": scaling, "original_max_position_embeddings": 16}
    np.testing.assert_allclose(freq(config, 16)[0], PLAIN, rtol=1e-6)
    long, spec = freq(config, 17)
    np.testing.assert_allclose(long, PLAIN / np.arange(2, half + 2), rtol=1e-6)
    assert spec.attention_factor == pytest.approx(math.sqrt(1 + math.log(64 / 16) / math.log(16)))


@pytest.mark.parametrize("kind", ["linear", "dynamic", "longrope"])
def test_lengths_are_of_one_regime_where_they_have_the_same_frequencies(kind):
    """Keys of one regime can be shared; those of two cannot."""
    scaling = {"type": kind, "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    found = {length: freq({"rope_scaling": scaling, "original_max_position_embeddings": 32}, length)
             for length in (1, 31, 32, 33, 63, 64, 65, 66, 200)}  # fmt: skip
    for a, (freq_a, spec) in found.items():
        for b, (freq_b, _) in found.items():
            assert (spec.regime(a) == spec.regime(b)) == bool((freq_a == freq_b).all()), (a, b)


def test_rotation_is_multiplication_by_unit_complex_numbers():
    spec = rope_from_config(BASE | {"partial_rotary_factor": 0.5}, HEAD_DIM)
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(5, 3, HEAD_DIM)).astype(np.float32), np.array([0, 1, 2, 257, 8191], np.int32)
    got = np.asarray(apply_rope(jnp.asarray(x), *rope_angles(spec, jnp.asarray(positions), jnp.asarray(positions))))
    half = HEAD_DIM // 4
    z = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(
        1j * positions[:, None, None] * np.asarray(spec.inv_freq)
    )
    np.testing.assert_allclose(got[..., :half], z.real, atol=2e-3)
    np.testing.assert_allclose(got[..., half : 2 * half], z.imag, atol=2e-3)
    np.testing.assert_array_equal(got[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize(
    ("scaling", "names"),
    [({"type": "spiral", "factor": 2}, "spiral"), ({"type": "yarn"}, "factor"), ({"type": "longrope"}, "short_factor")],
)
def test_unknown_or_incomplete_scaling_is_refused(scaling, names):
    with pytest.raises(ModelConfigError, match=names):
        rope_from_config(BASE | {"rope_scaling": scaling}, HEAD_DIM)
