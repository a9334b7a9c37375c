"""Latencies as a picture: which share of requests, or of tokens, came within how many milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turbojax.bench.latency import Trace
from turbojax.figure import new_figure, write_png

TITLES = ("first token", "per token after it", "gap between parts", "whole answer")


def plot_latencies(path: Path, traces: Sequence[Trace], title: str) -> None:
    """Writes a PNG with the four distributions.

    Args:
        path: the PNG file.
        traces: of requests that were answered.
        title: of the picture.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = new_figure(10, 6)
    figure.suptitle(title)
    values = (
        [trace.ttft_s for trace in traces],
        [value for trace in traces for value in trace.tpot_s],
        [value for trace in traces for value in trace.itl_s],
        [trace.e2e_s for trace in traces],
    )
    for panel, name, found in zip(figure.subplots(2, 2).flat, TITLES, values, strict=True):
        ordered = np.sort(1e3 * np.asarray(found))
        if len(ordered):
            panel.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post")
        panel.set(title=name, xlabel="ms", ylabel="share within", ylim=(0, 1))
        panel.grid(alpha=0.3)
    write_png(figure, path)
