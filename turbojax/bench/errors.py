"""What can be wrong with a benchmark's input, and with its run."""

from __future__ import annotations

from turbojax.errors import TurbojaxError


class BenchError(TurbojaxError):
    """A benchmark cannot be run as it was asked for; says what came and what is accepted."""
