"""Typed errors of turbojax: each names what failed, what came and what to do."""

from __future__ import annotations


class TurbojaxError(Exception):
    """Base of every error that turbojax raises on purpose."""


class ModelConfigError(TurbojaxError):
    """A field of the model's config.json is missing or cannot be honoured."""


class UnknownArchitectureError(ModelConfigError):
    """The config names an architecture that no family describes."""


class OutOfMemoryError(TurbojaxError):
    """Weights or KV pool do not fit the device; the message has the numbers."""
