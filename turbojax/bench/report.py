"""Results: rows with their floors, a table for the terminal, a JSON file that runs add to."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from turbojax.bench.errors import BenchError

Row = dict[str, Any]
HIGHER_IS_BETTER = {"tok/s": True, "ratio": True, "ms": False, "s": False}
PERCENTILES = ("mean", "p50", "p95", "p99")


def make_row(case: str, value: float, unit: str, floor: float | None, **details: Any) -> Row:
    """A result. `floor` is the best that the machine allows, in the same unit; `share` is how much of it was reached.

    Args:
        case: its name.
        value: what was measured.
        unit: a key of `HIGHER_IS_BETTER`.
        floor: None where there is none.
        details: more fields; those that are None are left out.
    """
    share = None if floor is None else value / floor if HIGHER_IS_BETTER[unit] else floor / value
    row = {"case": case, "value": value, "unit": unit, "floor": floor, "share": share}
    return row | {name: detail for name, detail in details.items() if detail is not None}


def length_name(num_tokens: int) -> str:
    """1024 as 1k, 1000 as 1000."""
    return f"{num_tokens // 1024}k" if num_tokens % 1024 == 0 else str(num_tokens)


class ResultFile:
    """A JSON file {device, versions, date, command, rows} whose rows are replaced case by case."""

    def __init__(self, path: Path, device: str) -> None:
        """Reads what is there.

        Raises:
            BenchError: it is no such file, or its rows are another device's.
        """
        self.path, self.device, self.rows = path, device, dict[str, Row]()
        if not path.exists():
            return
        try:
            content = json.loads(path.read_bytes())
            self.rows = {row["case"]: row for row in content["rows"]}
            found = content["device"]
        except (ValueError, TypeError, KeyError) as error:
            raise BenchError(f"{path} is no file of benchmark results; give another one to json") from error
        if found != device:
            raise BenchError(f"{path} has results of {found}, and this is {device}; give another file to json")

    def update(self, rows: Sequence[Row], header: dict[str, Any]) -> None:
        """Replaces the rows of the same cases, adds the others, and writes the file in one go.

        Args:
            rows: each gets the date and the command of the header: others of the file come from other runs.
            header: versions, date, command.
        """
        own = {name: header[name] for name in ("date", "command")}
        self.rows |= {row["case"]: row | own for row in rows}
        content = rounded({"device": self.device, **header, "rows": list(self.rows.values())})
        new = self.path.with_name(self.path.name + ".tmp")
        try:
            new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            os.replace(new, self.path)
        except OSError as error:
            raise BenchError(f"cannot write {self.path}: {error.strerror}") from error


def rounded(value: Any) -> Any:
    """JSON content with floats of five significant figures: more is noise."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def number(value: float | None) -> str:
    """Three significant figures, or all that are before the point."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """The rows as a table."""
    table = Table("case", box=None, pad_edge=False)
    for column in ("value", "unit", "floor", "share", "ms/step"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (
            number(row["value"]),
            row["unit"],
            number(row["floor"]),
            number(row["share"]),
            number(row.get("step_ms")),
        )
        table.add_row(row["case"], *numbers)
    console.print(table)


def print_latencies(latencies: dict[str, dict[str, float]], console: Console) -> None:
    """The table of what `latency.latencies_ms` gives."""
    table = Table("ms", box=None, pad_edge=False)
    for column in PERCENTILES:
        table.add_column(column, justify="right")
    for name, summary in latencies.items():
        table.add_row(name.removesuffix("_ms").upper(), *(number(summary[column]) for column in PERCENTILES))
    console.print(table)


def print_kernels(kernels: Sequence[tuple[str, float, int]], total_s: float, console: Console) -> None:
    """The longest kernels of a step: (name, seconds, runs) each."""
    table = Table("kernel", box=None, pad_edge=False)
    for column in ("us/step", "share"):
        table.add_column(column, justify="right")
    for name, seconds, _ in kernels:
        table.add_row(name[:90], f"{seconds * 1e6:,.1f}", f"{seconds / total_s:.3f}")
    table.add_row("all", f"{total_s * 1e6:,.1f}", "1")
    console.print(table)
