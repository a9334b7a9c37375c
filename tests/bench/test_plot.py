"""The picture, and what is said where it cannot be drawn."""

import sys

import pytest

from turbojax.bench.plot import plot_roofline
from turbojax.bench.report import make_row
from turbojax.bench.roofline import Rates
from turbojax.errors import MissingExtraError
from turbojax.figure import require_matplotlib


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'turbojax\[plot\]'"):
        require_matplotlib()


def test_a_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    step = make_row("decode b1 1k kv8", 560.0, "tok/s", 891.0, num_bytes=4.8e9, num_flops=1.5e10, seconds=1.8e-3)
    path = tmp_path / "roofline.png"
    plot_roofline(path, [step, make_row("ratio", 0.9, "ratio", 1.0)], Rates(4.3e12, 790e12), "H200")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
