"""The choice of implementation: counted, warned about once, refused where a kernel cannot run."""

import jax
import pytest

from pallas_kernels import backend


@pytest.fixture(autouse=True)
def _fresh_counts():
    backend.reset_counts()
    yield
    backend.reset_counts()


def test_cpu_takes_the_reference_silently():
    assert backend.choose("op", None, problem="too odd") == "reference"
    assert backend.num_fallbacks() == 0
    assert backend.chosen_implementations() == {"op": {"reference": 1}}


def test_gpu_falls_back_with_one_warning_and_a_count(monkeypatch):
    monkeypatch.setattr(backend, "on_gpu", lambda: True)
    with pytest.warns(backend.FallbackWarning, match="op runs its reference: too odd"):
        assert backend.choose("op", None, problem="too odd") == "reference"
    assert backend.choose("op", None, problem="too odd") == "reference"  # warnings are errors: a second one would fail
    assert backend.choose("op", None) == "triton"
    assert backend.num_fallbacks() == 2


def test_asking_for_an_impossible_kernel_raises():
    with pytest.raises(ValueError, match="too odd"):
        backend.choose("op", "triton", problem="too odd")
    with pytest.raises(ValueError, match="'cuda', accepted"):
        backend.choose("op", "cuda")


def test_minimum_dots():
    assert backend.dot_problem(16, 8, 16, 2) is None
    assert backend.dot_problem(16, 8, 32, 1) is None
    assert "k=16" in backend.dot_problem(16, 8, 8, 2)
    assert "m=8" in backend.dot_problem(8, 8, 16, 2)


@pytest.mark.skipif(not hasattr(jax.sharding, "AbstractDevice"), reason="abstract devices need a newer jax")
@pytest.mark.parametrize(("kind", "fp8"), [("A100", False), ("RTX 4090", True), ("H100", True), ("B200", True)])
def test_capability_of_abstract_devices(kind, fp8):
    device = jax.sharding.AbstractDevice(device_kind=f"NVIDIA {kind}", num_cores=None, platform="gpu")
    try:
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    except TypeError:
        pytest.skip("this jax's AbstractMesh takes no device")
    with jax.sharding.use_abstract_mesh(mesh):
        assert backend.on_gpu()
        assert backend.capability_problem() is None
        assert (backend.capability_problem(backend.MIN_FP8_CAPABILITY) is None) == fp8


@pytest.mark.parametrize(
    ("kind", "expected"), [("NVIDIA H200", ["jax.experimental.pallas.mosaic_gpu"]), ("NVIDIA A100", [])]
)
def test_programs_from_disk_find_mosaic_on_a_hopper_alone(monkeypatch, kind, expected):
    imported = []
    monkeypatch.setattr(backend.importlib, "import_module", imported.append)
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        backend.import_mosaic()
    assert imported == expected
