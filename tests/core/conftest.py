"""The real default model, loaded once for all tests of the pure core."""

import pytest

from turbojax.models.model import load_model


@pytest.fixture(scope="session")
def smol(request):
    import os

    if p := os.environ.get("SMOL_TMP"):
        return load_model(p, dtype="float32")
    smollm2 = request.getfixturevalue("smollm2")
    return load_model(smollm2, dtype="float32")
