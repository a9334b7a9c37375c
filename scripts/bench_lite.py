"""How long `turbojax lite` takes on the default model, in seconds of the clock and of the processor, as JSON.

On a machine that others use, the processor's seconds divided by its cores say what the clock would say without them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def measure(method: str, options: list[str], work_dir: Path) -> dict[str, object]:
    """Runs the command in a process of its own, from start to written checkpoint."""
    command = ["lite", method, "--work-dir", str(work_dir), *options]
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "turbojax", *command], check=True, stdout=subprocess.DEVNULL)
    after, cores = resource.getrusage(resource.RUSAGE_CHILDREN), len(os.sched_getaffinity(0))
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "command": " ".join(["turbojax", "lite", method, *options]),
        "wall_s": round(time.perf_counter() - start, 1),
        "cpu_s": round(cpu_s, 1),
        "cores": cores,
        "load_average": round(os.getloadavg()[1], 1),
        "peak_rss_mb": round(after.ru_maxrss / 1024),
    }


def main() -> None:
    """A row a method, added to a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="+", help="auto_awq, auto_gptq, rtn, smooth_quant, fp8")
    parser.add_argument("--keep", type=Path, help="a folder for the checkpoints; thrown away by default")
    parser.add_argument("--json", type=Path, help="rows of the same command are replaced")
    parser.add_argument("--options", default="--w-group-size 64 --calib-samples 32 --calib-seqlen 512")
    args = parser.parse_args()
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        for method in args.methods:
            row = measure(method, args.options.split(), (args.keep or Path(folder)) / method)
            print(json.dumps(row), flush=True)
            rows = [old for old in rows if old["command"] != row["command"]] + [row]
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
