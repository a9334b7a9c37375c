"""`turbojax check_env`: what is installed, what it runs on and which kernels it will use."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata

import typer

from turbojax import hub

PACKAGES = (
    "turbojax", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "orbax-checkpoint", "transformers",
    "tokenizers", "gguf", "safetensors", "numpy", "ml_dtypes",
)  # fmt: skip


def check_env() -> None:
    """Show versions, devices, the implementation of each kernel, and where the default model is."""
    _section("versions", [("python", platform.python_version()), ("system", platform.platform()), *_versions()])
    _section("devices", _devices())
    _section("kernels", _kernels())
    _section("files", _files())


def _section(title: str, rows: Iterable[tuple[str, str]]) -> None:
    typer.echo(title)
    for name, value in rows:
        typer.echo(f"  {name:<20} {value}")


def _versions() -> list[tuple[str, str]]:
    rows = []
    for package in PACKAGES:
        try:
            rows.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            if not package.startswith("jax-cuda"):  # of the two plugins at most one is there
                rows.append((package, "not installed"))
    return rows


def _devices() -> list[tuple[str, str]]:
    import jax

    from turbojax.memory import free_device_bytes

    try:
        devices = jax.devices()
    except RuntimeError as error:
        return [("error", " ".join(str(error).split()))]
    rows = [(f"{device.platform} {device.id}", device.device_kind) for device in devices]
    return [
        *rows,
        ("free memory", f"{free_device_bytes() / 2**30:.1f} GiB on {devices[0]}"),
        ("cores", str(os.cpu_count())),
    ]


def _kernels() -> list[tuple[str, str]]:
    from pallas_kernels import backend

    if not backend.on_gpu():
        how = "reference, compiled by XLA: the kernels are for NVIDIA GPUs"
    elif problem := backend.capability_problem():
        how = f"reference: {problem}"
    else:
        how = "triton where the shape allows it; one warning where it does not"
    return [(op, how) for op in backend.OPS]


def _files() -> list[tuple[str, str]]:
    model = hub.cache_dir() / hub.DEFAULT_FILE
    state = str(model) if hub.is_default(model) else "not fetched yet: the first run without --model fetches it"
    compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", "not kept: JAX_COMPILATION_CACHE_DIR is not set")
    return [("cache", str(hub.cache_dir())), ("compiled steps", compiled), ("default model", state)]
