"""What a run ends with: the error of every linear and the size before and after, as a table and as JSON."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turbojax.lite.methods import LinearReport

FILE = "lite_report.json"
LAYER = re.compile(r"\.(\d+)\.(.+)\.weight$")


@dataclass(frozen=True)
class Report:
    """A finished run.

    Attributes:
        method: its name.
        path: what was written.
        measure: "outputs" | "weights", what the errors are relative to.
        linears: in the order of the layers.
        bytes_before, bytes_after: of the files.
        seconds: of this run; a resumed one counts from its own start.
        settings: what was asked for.
    """

    method: str
    path: Path
    measure: str
    linears: list[LinearReport]
    bytes_before: int
    bytes_after: int
    seconds: float
    settings: dict[str, Any]

    @property
    def json_path(self) -> Path:
        """Where the same stands as JSON."""
        return self.path / FILE

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": self.path.name}

    def table(self) -> str:
        """A row a layer: the error of each of its linears in percent."""
        rows: dict[int, dict[str, float]] = defaultdict(dict)
        for linear in self.linears:
            match = LAYER.search(linear.name)
            assert match is not None, linear.name
            rows[int(match[1])][match[2].rpartition(".")[2].removesuffix("_proj")] = 100 * linear.error
        names = list(rows[0])
        head = f"{'layer':>5}" + "".join(f"{name:>9}" for name in names)
        lines = [f"relative error of {self.measure}, %", head]
        lines += [f"{layer:>5}" + "".join(f"{row[name]:>9.2f}" for name in names) for layer, row in rows.items()]
        means = [sum(row[name] for row in rows.values()) / len(rows) for name in names]
        lines.append(f"{'mean':>5}" + "".join(f"{mean:>9.2f}" for mean in means))
        before, after = self.bytes_before / 1e6, self.bytes_after / 1e6
        lines.append(f"{before:.1f} MB before, {after:.1f} MB after; {self.seconds:.0f} s; {self.path}")
        return "\n".join(lines)
