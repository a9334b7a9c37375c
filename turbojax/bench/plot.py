"""The roofline as a picture: how far each measured step is below the machine's own limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turbojax.bench.report import Row
from turbojax.bench.roofline import Rates
from turbojax.figure import new_figure, write_png


def plot_roofline(path: Path, rows: Sequence[Row], rates: Rates, title: str) -> None:
    """Writes a PNG: FLOP per byte against TFLOP/s, a point for each row that has `num_bytes` and `num_flops`.

    Args:
        path: the PNG file.
        rows: of one run.
        rates: the roofs.
        title: of the picture.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = new_figure(8, 5)
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="FLOP/byte", ylabel="TFLOP/s", title=title)
    points = {
        row["case"]: (row["num_flops"] / row["num_bytes"], row["num_flops"] / row["seconds"] / 1e12)
        for row in rows
        if "num_flops" in row
    }
    ridge = rates.flops_per_s / rates.bytes_per_s
    intensities = [x for x, _ in points.values()]
    x = np.geomspace(min([*intensities, ridge]) / 4, max([*intensities, ridge]) * 4, 200)
    roof = np.minimum(x * rates.bytes_per_s, rates.flops_per_s) / 1e12
    label = f"{rates.bytes_per_s / 1e12:.3g} TB/s, {rates.flops_per_s / 1e12:.3g} TFLOP/s"
    axes.plot(x, roof, color="black", label=label)
    for case, (intensity, achieved) in points.items():
        axes.plot(intensity, achieved, "o", label=case)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    write_png(figure, path)
