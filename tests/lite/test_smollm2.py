"""The default model's own weights, rounded: the errors that were recorded for them elsewhere."""

import json

import numpy as np
import pytest

from tests.conftest import SHARED
from turbojax.lite.floats import FloatModel
from turbojax.lite.grid import Grid, snapped


@pytest.fixture(scope="module")
def recorded():
    path = SHARED / "smollm2" / "expected.json"
    if not path.exists():
        pytest.skip(f"no recorded figures at {path}: they are kept beside the repository")
    return json.loads(path.read_text())["perplexity"]["weight_relative_rms_error"]


@pytest.fixture(scope="module")
def weights(smollm2):
    """Its 210 linears, float32 [N, K]."""
    model = FloatModel(smollm2)
    return [model.read(name) for layer in range(model.num_layers) for name in model.weight_names(layer)]


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("w4_g64", Grid(4, 64, float_offset=True)),
        ("w4_g64_int_zero", Grid(4, 64)),
        ("w4_g32_int_zero", Grid(4, 32)),
    ],
)
def test_rounding_errs_as_recorded(weights, recorded, name, grid):
    wrong = sum(float(np.sum((snapped(w, grid) - w) ** 2, dtype=np.float64)) for w in weights)
    power = sum(float(np.sum(w**2, dtype=np.float64)) for w in weights)
    assert (wrong / power) ** 0.5 == pytest.approx(recorded[name], rel=1e-3)


def test_a_float_offset_in_the_files_own_groups_loses_nothing(weights):
    assert len(weights) == 210
    for w in weights:
        np.testing.assert_array_equal(snapped(w, Grid(4, 32, float_offset=True)), w)
