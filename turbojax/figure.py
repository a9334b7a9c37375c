"""Pictures without a display: matplotlib where it is installed, PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turbojax.errors import MissingExtraError


def require_matplotlib() -> None:
    """Says early that there can be no plot.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("the plot needs matplotlib: pip install 'turbojax[plot]'") from error


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_png(figure: Any, path: Path) -> None:
    figure.savefig(path, format="png", dpi=150)
