"""The JSON file of a benchmark that runs on a CPU."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_results(path: Path, versions: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows with what they were measured on, and the command that measured them."""
    report = {
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
