"""Which implementation runs an op, and the only door to Pallas-Triton.

Pallas-Triton is deprecated since JAX 0.11 (still there in 0.12): everything of it that kernels use is re-exported
here, so that leaving it means changing one module.
"""

from __future__ import annotations

import collections
import importlib
import warnings
from typing import Any, Literal

import jax

with warnings.catch_warnings():  # 2026-11: JAX >= 0.11 warns at import; drop the filter when the backend changes
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas import triton as _triton

Implementation = Literal["triton", "reference", "interpret"]

inline_asm = _triton.elementwise_inline_asm
masked_load = _triton.load
masked_store = _triton.store

IMPLEMENTATIONS: tuple[Implementation, ...] = ("triton", "reference", "interpret")
MIN_CAPABILITY = (8, 0)  # bf16 dots and cp.async
MIN_FP8_CAPABILITY = (8, 9)
HOPPER = (9, 0)  # has kernels of its own, in Pallas-Mosaic
HOPPER_MULTIPROCESSORS = 132  # of an H100 and an H200
MIN_DOT = {"m": 16, "n": 8, "k_bits": 256}  # one mma.sync: 16 x 8 x 256 bits of either operand

# The public ops that `choose` decides for, by the names that it counts them under.
OPS = (
    "affine_linear",
    "eight_bit_linear",
    "add_rms_norm",
    "rope_write",
    "write_kv",
    "paged_decode_attention",
    "paged_prefill_attention",
    "sample_tokens",
)

# Shared memory of a program by compute capability; every other GPU from 8.0 on has at least the last figure.
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_MIN_SHARED_KIB = 99
_CAPABILITY_WITHOUT_DEVICE = (9, 0)

_CAPABILITY_OF_KIND = {  # for abstract devices, which carry a name only
    "A100": (8, 0),
    "RTX 4090": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "B200": (10, 0),
    "RTX PRO 6000": (12, 0),
}

_chosen: collections.Counter[tuple[str, str]] = collections.Counter()
_fallbacks: collections.Counter[tuple[str, str]] = collections.Counter()


class FallbackWarning(UserWarning):
    """A GPU runs an op's reference instead of its kernel: right, and slow."""


def approximate(instruction: str, x: jax.Array) -> jax.Array:
    """Inside a Triton kernel: ex2 or lg2 of float32 as one instruction.

    The compiler's own scale subnormal numbers around it, which takes five.
    """
    shape = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    return inline_asm(
        f"{instruction}.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=shape
    )[0]


def compiler_params(num_warps: int, num_stages: int) -> Any:
    """Warps of a program and depth of its load pipeline: the only two knobs of the backend."""
    return _triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def _target() -> Any:
    """The abstract device of the current mesh if there is one (lowering without a GPU), else the default device."""
    mesh = jax.sharding.get_abstract_mesh()
    abstract = getattr(mesh, "abstract_device", None)
    if abstract is not None:
        return abstract
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # options have no types
    return default if isinstance(default, jax.Device) else jax.devices()[0]


def on_gpu() -> bool:
    """Whether ops are traced for a GPU."""
    return _target().platform in ("gpu", "cuda")


def device_kind() -> str:
    """The device's name, "NVIDIA H200" for example: the key of tuning tables."""
    return _target().device_kind


def compute_capability() -> tuple[int, int] | None:
    """(major, minor) of the GPU that ops are traced for; None where the device is no known NVIDIA GPU."""
    device = _target()
    if version := getattr(device, "compute_capability", None):
        major, _, minor = str(version).partition(".")
        return int(major), int(minor)
    return next((cc for kind, cc in _CAPABILITY_OF_KIND.items() if kind in device.device_kind), None)


def shared_bytes() -> int:
    """Shared memory that a program may have on the GPU that ops are traced for; a Hopper's where none is known."""
    return _SHARED_KIB.get(compute_capability() or _CAPABILITY_WITHOUT_DEVICE, _MIN_SHARED_KIB) << 10


def capability_problem(minimum: tuple[int, int] = MIN_CAPABILITY) -> str | None:
    """Why this GPU cannot run a kernel that needs `minimum`; None where it can or where no GPU is known (lowering)."""
    found = compute_capability()
    if found is None or found >= minimum:
        return None
    return f"compute capability {found[0]}.{found[1]} is below {minimum[0]}.{minimum[1]}"


def import_mosaic() -> None:
    """Tells XLA of Mosaic, whose kernels programs from disk may call on a Hopper; tracing such a kernel does it too."""
    if compute_capability() == HOPPER:
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def dot_problem(m: int, n: int, k: int, itemsize: int) -> str | None:
    """Why the tensor cores cannot take an [m, k] x [k, n] dot of `itemsize`-byte operands; None where they can."""
    smallest_k = MIN_DOT["k_bits"] // (8 * itemsize)
    if m >= MIN_DOT["m"] and n >= MIN_DOT["n"] and k >= smallest_k:
        return None
    return f"a dot of m={m}, n={n}, k={k} is below m={MIN_DOT['m']}, n={MIN_DOT['n']}, k={smallest_k}"


def choose(op: str, implementation: Implementation | None, problem: str | None = None) -> Implementation:
    """Picks how `op` runs and counts the choice; called once per trace.

    Args:
        op: the op's public name.
        implementation: what the caller asked for; None takes the kernel on a GPU and the reference elsewhere.
        problem: why the kernel cannot run here; None where it can.

    Raises:
        ValueError: the name is unknown, or a kernel was asked for that cannot run.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation={implementation!r}, accepted: None or one of {IMPLEMENTATIONS}")
    if implementation in ("triton", "interpret") and problem:
        raise ValueError(f"{op}: implementation={implementation!r} cannot run: {problem}; use None or 'reference'")
    if implementation is None:
        implementation = "triton" if on_gpu() and not problem else "reference"
        if on_gpu() and problem:
            _count_fallback(op, problem)
    _chosen[op, implementation] += 1
    return implementation


def _count_fallback(op: str, problem: str) -> None:
    if not _fallbacks[op, problem]:
        warnings.warn(f"{op} runs its reference: {problem}", FallbackWarning, stacklevel=4)
    _fallbacks[op, problem] += 1


def chosen_implementations() -> dict[str, dict[str, int]]:
    """How often each op was traced with each implementation, {op: {implementation: count}}."""
    counts: dict[str, dict[str, int]] = {}
    for (op, implementation), count in _chosen.items():
        counts.setdefault(op, {})[implementation] = count
    return counts


def num_fallbacks() -> int:
    """Traces in which a GPU had to take a reference; zero in a healthy run."""
    return sum(_fallbacks.values())


def reset_counts() -> None:
    """Forgets choices, fallbacks and which warnings were given."""
    _chosen.clear()
    _fallbacks.clear()
