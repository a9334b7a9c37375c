"""Compiled steps on disk: a second start of the same engine neither traces nor compiles them.

JAX's own compilation cache spares XLA's time, but its key is the lowered program, so every program is traced and
lowered first: about a second each for a model with Pallas kernels, on one thread, for up to 40 of them. Here the key is
all that goes into a program. Its files stand beside JAX's, in the same folder, and are as trusted as those.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from pallas_kernels import backend
from turbojax.hub import cache_dir

PACKAGES = Path(__file__).parents[1]
SOURCES = ("turbojax", "pallas_kernels")
LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
# The compiler for GPUs is theirs, and may be another version than jaxlib.
PLUGINS = ("jax-cuda12-pjrt", "jax-cuda12-plugin", "jax-cuda13-pjrt", "jax-cuda13-plugin")
# Options of JAX that change a program without showing in its inputs.
OPTIONS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_debug_nans", "jax_debug_infs", "jax_disable_jit",
    "jax_default_prng_impl", "jax_threefry_partitionable", "jax_random_seed_offset",
)  # fmt: skip
FOLDER = "turbojax-programs"
UNUSED_FOR_S = 14 * 24 * 3600

log = logging.getLogger(__name__)


def use_compilation_cache() -> None:
    """Keeps what is compiled in the user's cache folder, small programs too, where the process has not chosen one."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]  # options have no types
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


_hits = threading.local()


def _heard(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits" and getattr(_hits, "found", None) is not None:
        _hits.found.append(event)


jax.monitoring.register_event_listener(_heard)


@contextlib.contextmanager
def jax_cache_hits() -> Iterator[list[str]]:
    """What JAX's own cache gives to this thread meanwhile."""
    _hits.found = []
    try:
        yield _hits.found
    finally:
        _hits.found = None


class ProgramCache:
    """The programs of one engine: of one model, one state's shapes, one device and one version of everything."""

    def __init__(self, folder: Path, devices: Sequence[jax.Device] | None = None) -> None:
        """`devices` are those that the programs run on, where they are not JAX's own choice."""
        self._folder, self._devices = folder, devices

    @classmethod
    def of(cls, *inputs: Any, devices: Sequence[jax.Device | None] = (None,)) -> ProgramCache | None:
        """For programs that take these trees of arrays on these devices (None: the default one).

        None where JAX's cache is off, or no local folder.
        """
        root = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        if not root or "://" in root or not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
            return None
        ids = [f"on {[None if device is None else device.id for device in devices]}"] * (devices != (None,))
        told = "\n".join((*_world(), *ids, *(_describe(tree) for tree in inputs)))
        folder = Path(root).expanduser() / FOLDER / hashlib.sha256(told.encode()).hexdigest()[:32]
        return cls(folder, [device for device in devices if device is not None] or None)

    def _file(self, key: Hashable) -> Path:
        return self._folder / hashlib.sha256(repr(key).encode()).hexdigest()[:32]

    def load(self, key: Hashable, in_tree: Any, out_tree: Any) -> Any | None:
        """The program under a key; None if there is none, or none that can be read."""
        try:
            payload = self._file(key).read_bytes()
            with contextlib.suppress(OSError):  # of a cache that can only be read
                os.utime(self._folder)  # in use: see `touch`
            backend.import_mosaic()
            return serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, execution_devices=self._devices
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # a torn file, another driver: it is compiled anew and written over
            log.debug("%s cannot be read: %s: %s", self._file(key), type(error).__name__, error)
            return None

    def save(self, key: Hashable, program: Any) -> None:
        """Keeps a program; a cache that cannot be written costs the next start its time, and this one nothing."""
        path = self._file(key)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            payload, _, _ = serialize_executable.serialize(program)
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(payload)
            draft.replace(path)
        except Exception as error:
            draft.unlink(missing_ok=True)
            log.debug("%s cannot be written: %s: %s", path, type(error).__name__, error)

    def touch(self) -> None:
        """Marks this folder as used, and removes those that nobody has used for two weeks: other versions, mostly."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            os.utime(self._folder)
            for other in self._folder.parent.iterdir():
                if time.time() - other.stat().st_mtime > UNUSED_FOR_S:
                    for file in other.iterdir():
                        file.unlink()
                    other.rmdir()
        except OSError as error:  # a read-only cache, or another process that cleans up
            log.debug("%s: %s", self._folder, error)


@functools.cache
def _source_digest() -> str:
    """Of every file that programs are made of, tuning tables included."""
    digest = hashlib.sha256()
    for package in SOURCES:
        for path in sorted((PACKAGES / package).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(f"{path.relative_to(PACKAGES)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _world() -> Iterator[str]:
    """Everything but the inputs: sources, libraries, options, device and CUDA, a CPU's instructions."""
    yield _source_digest()
    yield from (f"{name} {metadata.version(name)}" for name in LIBRARIES)
    for name in PLUGINS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"
    yield from (f"{name} {getattr(jax.config, name, None)}" for name in OPTIONS)
    yield f"XLA_FLAGS {os.environ.get('XLA_FLAGS')}"
    device, *others = jax.devices()
    yield f"{device.platform} {device.device_kind} {device.id} of {1 + len(others)} {device.client.platform_version}"
    if device.platform == "cpu":
        yield _cpu_flags()


def _cpu_flags() -> str:
    """The instructions of this processor: a home folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _describe(tree: Any) -> str:
    """Shapes, types and static parts of a tree of arrays."""
    leaves = [f"{leaf.dtype}{leaf.shape}" for leaf in jax.tree.leaves(tree)]
    return f"{jax.tree.structure(tree)} {leaves}"
