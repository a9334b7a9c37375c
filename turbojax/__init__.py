"""Mixed-precision LLM inference as pure JAX functions; names load when first used, so host modules need no jax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turbojax.api import Pipeline, pipeline
    from turbojax.configs import ClusterConfig, EngineConfig, GenerationConfig
    from turbojax.engine.response import Response
    from turbojax.integrations.flax_params import from_flax
    from turbojax.integrations.params import from_params, to_params
    from turbojax.session import Session

__version__ = "0.1.0"

_MODULE_OF = {
    "ClusterConfig": "turbojax.configs",
    "EngineConfig": "turbojax.configs",
    "GenerationConfig": "turbojax.configs",
    "Pipeline": "turbojax.api",
    "Response": "turbojax.engine.response",
    "Session": "turbojax.session",
    "from_flax": "turbojax.integrations.flax_params",
    "from_params": "turbojax.integrations.params",
    "pipeline": "turbojax.api",
    "to_params": "turbojax.integrations.params",
}

__all__ = [
    "ClusterConfig",
    "EngineConfig",
    "GenerationConfig",
    "Pipeline",
    "Response",
    "Session",
    "from_flax",
    "from_params",
    "pipeline",
    "to_params",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'turbojax' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
