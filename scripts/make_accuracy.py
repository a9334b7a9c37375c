"""What every precision costs the default model, measured on a text and written as docs/accuracy.md.

    python scripts/make_accuracy.py --text evaluation.txt
    python scripts/make_accuracy.py --text evaluation.txt --checkpoint "W4 g64 AWQ=DIR" --checkpoint "W4 g64 GPTQ=DIR"

Figures are kept in benchmarks/results/accuracy.json; a row that is there already is not measured again.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from turbojax.assembly import open_model
from turbojax.configs import EngineConfig
from turbojax.core.weights import Weights
from turbojax.hub import default_model
from turbojax.kv_policy import KVPolicy
from turbojax.lite.audit import Audit, kv_bytes_per_token, uniform
from turbojax.lite.audit_run import CALIBRATION
from turbojax.lite.audit_weights import rounded_weights
from turbojax.lite.evaluate import cut_windows
from turbojax.lite.evaluate_text import token_ids_of
from turbojax.lite.grid import Grid
from turbojax.lite.rotation import k_scale_of

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "accuracy.json", ROOT / "docs" / "accuracy.md"
WINDOW_LEN, NUM_WINDOWS = 1024, 8

# Bits of K and of V, whether keys of 4 bits are turned, and whether a calibration scales them before.
KV_ROWS: Mapping[str, tuple[int, int, bool, bool]] = {
    "float32": (16, 16, False, False),
    "KV8": (8, 8, False, False),
    "K8 V4": (8, 4, False, False),
    "K4 V8": (4, 8, False, False),
    "KV4": (4, 4, False, False),
    "KV4, Hadamard": (4, 4, True, False),
    "KV4, Hadamard, calibrated": (4, 4, True, True),
}
WEIGHT_ROWS: Mapping[str, Grid] = {
    "W4 g64 RTN, float offset": Grid(4, 64, float_offset=True),
    "W4 g64 RTN": Grid(4, 64),
    "W4 g32 RTN": Grid(4, 32),
}


def opened(path: Path) -> Weights:
    """A checkpoint as float32, whose K and V have 16 bits."""
    return open_model(
        path, EngineConfig(dtype="float32", quant_policy=0, kv_hadamard=False), lambda share: None
    ).weights


def candidates(audit: Audit, checkpoints: Mapping[str, Path]) -> Iterator[tuple[str, KVPolicy, Any]]:
    """Name, policy, and what makes the weights."""
    for name, (k_bits, v_bits, hadamard, _) in KV_ROWS.items():
        yield name, uniform(audit.spec, k_bits, v_bits, hadamard=hadamard), lambda: None
    whole = uniform(audit.spec, 16, 16)
    for name, grid in WEIGHT_ROWS.items():
        yield name, whole, lambda grid=grid: rounded_weights(audit.weights, grid)
    for name, path in checkpoints.items():
        yield name, whole, lambda path=path: opened(path)


def measure(text: Path, checkpoints: Mapping[str, Path], results: dict[str, Any]) -> None:
    """Adds the rows that are missing, and saves after each."""
    model = default_model()
    audit = Audit(opened(model), cut_windows(token_ids_of(model, text), WINDOW_LEN, NUM_WINDOWS))
    ones, found_scale = audit.k_scale, k_scale_of(audit.weights, cut_windows(token_ids_of(model, None), *CALIBRATION))
    for name, policy, make_weights in candidates(audit, checkpoints):
        if name in results["rows"]:
            continue
        audit.k_scale = found_scale if name in KV_ROWS and KV_ROWS[name][3] else ones
        found = audit.measure(policy, make_weights(), greedy=True)
        results["rows"][name] = asdict(found) | {
            "perplexity": found.perplexity,
            "kv_bytes_per_token": kv_bytes_per_token(audit.spec, policy),
        }
        print(name, f"perplexity {found.perplexity:.4f}, KL {found.kl:.6f}", flush=True)
        results["header"] = {
            "model": model.name, "text": text.name, "windows": [NUM_WINDOWS, WINDOW_LEN],
            "date": datetime.date.today().isoformat(), "jax": version("jax"), "device": "CPU",
        }  # fmt: skip
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


HEAD = """# Accuracy

Made by `scripts/make_accuracy.py` from `benchmarks/results/accuracy.json`; do not edit.

SmolLM2-135M-Instruct (Q4_1, as it is embedded) on the opening of Jane Austen's *Persuasion*. The text is tokenised as
a whole without a start token, its first {tokens} tokens are cut into {num_windows} windows of {window_len} that do not
overlap, each window is run alone, and all its tokens but the first are scored. KL is the mean of KL(float32 || row) of
the next token over the same positions; "same top token" is the share of positions where both have the same likeliest
token; "first other" counts greedy tokens after a prompt until the row would choose another than float32. Rounding that
is calibrated has seen other text: the built-in opening of *Emma*. jax {jax}, {device}, {date}.
"""

NOTES = """
## Reading it

- A KV cache of 8 bits costs less than rounding activations to bfloat16 does (KL 0.0007). Values of 4 bits cost little;
  keys of 4 bits cost nearly all that a KV cache of 4 bits does, because a few of their dims are much larger than the
  others and take up the 16 levels.
- `EngineConfig(kv_hadamard=True)` multiplies queries and keys by a Hadamard matrix behind RoPE in the layers whose keys
  have 4 bits. Their products stay as they are, and the large dims are spread over all of a head's.
- `turbojax lite calibrate MODEL` also finds a factor for each dim of a key, by which its query is divided: large where
  queries are large, so that an error of the key costs much. It is kept with the checkpoint (`turbojax_k_scale.npy`),
  and engines that turn keys take it from there. `save_model` hands policy and factors on to a native checkpoint, which
  itself cannot be calibrated.
- `turbojax lite calibrate --budget 0.01 --window-len 256 --num-windows 2 --work-dir smol-kv` on this model
  takes 6.7 minutes of one core (2026-11-30) and finds K4 V4 for 13 layers, K8 V4 for 13, K8 V8 for 4:
  8496 bytes a token, at KL 0.0097 on those 512 tokens of the built-in text, on which it was chosen too.
- The weights of this model lie on grids of 4 bits in groups of 32 already. Rounding them to other grids loses more than
  on a model that was kept in 16 bits, and perplexity does not follow the error: judge these rows by KL.
- `turbojax lite audit MODEL --text FILE` makes such a table of another model, with KV and weights of every layer alone;
  `--budget KL` finds the fewest KV bits by layer within a KL, and `--write` keeps them where the engine finds them.
"""


def page(results: Mapping[str, Any]) -> str:
    """docs/accuracy.md."""
    header, rows = results["header"], results["rows"]
    num_windows, window_len = header["windows"]
    reference = rows["float32"]["perplexity"]
    lines = [
        HEAD.format(tokens=num_windows * window_len, num_windows=num_windows, window_len=window_len, **header),
        "| | perplexity | x float32 | KL, nats | same top token | first other | KV bytes/token |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        first = f"none of {row['num_greedy']}" if row["first_divergence"] is None else row["first_divergence"]
        lines.append(
            f"| {name} | {row['perplexity']:.3f} | {row['perplexity'] / reference:.4f} | {row['kl']:.5f} "
            f"| {row['top1']:.1%} | {first} | {row['kv_bytes_per_token']} |"
        )
    return "\n".join(lines) + "\n" + NOTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="measure on this; without it the page alone is made again")
    parser.add_argument("--checkpoint", action="append", default=[], metavar="NAME=PATH", help="a row of its own")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"header": {}, "rows": {}}
    if arguments.text is not None:
        checkpoints = {name: Path(path) for name, _, path in (each.partition("=") for each in arguments.checkpoint)}
        measure(arguments.text, checkpoints, results)
    PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
