"""Decode speed of transformers' `generate` with torch in bfloat16, as a row beside the engine's.

    python scripts/bench_torch.py --batch 16 --context 1024 --json benchmarks/results/engine_h200.json

Random weights, random prompts, greedy; the time of a step is the difference of two lengths, so that prefill stays out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from turbojax.bench.report import length_name, make_row, rounded
from turbojax.models.shapes import shape_config

SHORT, LONG = 16, 80  # new tokens of the two runs
REPEATS = 3


def random_model(shape: str) -> Any:
    """The shape's transformers model on the GPU in bfloat16; its own random initialisation."""
    config = dict(shape_config(shape))
    (architecture,) = config.pop("architectures")
    config.pop("torch_dtype", None)
    kind = getattr(transformers, architecture)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        return kind(kind.config_class(**config)).eval()


def seconds(model: Any, prompts: Any, num_new: int) -> float:
    """The best of some runs that generate `num_new` tokens for every prompt."""
    best = float("inf")
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=num_new, min_new_tokens=num_new,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="a file of `turbojax bench` that takes the row")
    options = parser.parse_args()
    model = random_model(options.shape)
    shape = (options.batch, options.context)
    prompts = torch.randint(0, model.config.vocab_size, shape, device="cuda", generator=torch.Generator("cuda"))
    with torch.inference_mode():
        seconds(model, prompts, SHORT)
        step_s = (seconds(model, prompts, LONG) - seconds(model, prompts, SHORT)) / (LONG - SHORT)
    case = f"transformers b{options.batch} {length_name(options.context)} bf16"
    row = make_row(
        case, options.batch / step_s, "tok/s", None, step_ms=1e3 * step_s, torch=torch.__version__,
        transformers=transformers.__version__, date=datetime.date.today().isoformat(),
        command=" ".join(["python", *sys.argv]),
    )  # fmt: skip
    print(f"{case}: {row['value']:,.0f} tok/s, {row['step_ms']:.2f} ms a step")
    if options.json is not None:
        add_row(options.json, row)


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Puts the row among those of a run of the engine, in place of an older one of its case."""
    content = json.loads(path.read_bytes())
    content["rows"] = [*(old for old in content["rows"] if old["case"] != row["case"]), rounded(row)]
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
