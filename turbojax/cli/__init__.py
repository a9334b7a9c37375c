"""The `turbojax` command."""

from turbojax.cli.app import main

__all__ = ["main"]
