"""Kernel times from a profile's planes."""

from types import SimpleNamespace as Node

import jax.numpy as jnp
import pytest

from turbojax.bench.errors import BenchError
from turbojax.bench.kernels import kernel_times, profile_kernels


def plane(name, **lines):
    return Node(
        name=name,
        lines=[
            Node(name=line.replace("_", " "), events=[Node(name=n, duration_ns=ns) for n, ns in events])
            for line, events in lines.items()
        ],
    )


def test_only_what_ran_on_the_streams_of_gpus_counts():
    planes = [
        plane("/device:GPU:0", Stream_7=[("gemm", 3000), ("norm", 500), ("gemm", 1000)], XLA_Ops=[("gemm", 99)]),
        plane("/device:GPU:1", Stream_9=[("norm", 700)]),
        plane("/host:CPU", Stream_1=[("host", 5)]),
    ]
    times = kernel_times(planes)
    assert times.seconds == pytest.approx({"gemm": 4e-6, "norm": 1.2e-6})
    assert times.counts == {"gemm": 2, "norm": 2}
    assert times.total_s == pytest.approx(5.2e-6)
    assert times.top(1) == [("gemm", pytest.approx(4e-6), 2)]


def test_without_a_gpu_it_says_so():
    with pytest.raises(BenchError, match="saw no GPU kernels"):
        profile_kernels(lambda: jnp.ones(3).block_until_ready())
