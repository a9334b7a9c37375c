"""What must be in the process environment before jax is imported."""

from __future__ import annotations

import os

from turbojax.hub import cache_dir

# JAX takes 75 % of a GPU by default. The rest of this share is for the CUDA context, cuBLAS and graphs, which
# allocate beside JAX's pool.
GPU_MEMORY_SHARE = "0.92"


def prepare_environment() -> None:
    """Sets the defaults of a command-line run; what the user has set stays.

    Compiled steps are kept on disk from the first millisecond on: a process compiles dozens of small buckets, each
    below JAX's default threshold of one second, which together are most of a second start.
    """
    defaults = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": GPU_MEMORY_SHARE,
        "JAX_COMPILATION_CACHE_DIR": str(cache_dir() / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # NVLink's multicast needs rights that containers often lack, and NCCL then ends the process.
        "NCCL_NVLS_ENABLE": "0",
        # transformers says at import that it found no torch, which it is not asked to use.
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
