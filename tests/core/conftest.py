"""The real default model, loaded once for all tests of the pure core."""

import pytest

from turbojax.models.model import load_model


@pytest.fixture(scope="session")
def smol(smollm2):
    return load_model(smollm2, dtype="float32")
