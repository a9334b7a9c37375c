"""KL divergence, top-1 agreement and perplexity of checkpoints beside the default model in float32, as JSON rows.

Windows of 1,024 tokens that do not overlap, from the start of a text; ids 1 .. 1,023 of each are scored.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import is_native
from turbojax.core.decoder import forward, logits_of
from turbojax.core.state import EngineState
from turbojax.core.steps import chunk_rows
from turbojax.core.weights import Weights
from turbojax.hub import default_model
from turbojax.lite.evaluate import chunks_of, cut_windows, window_state
from turbojax.lite.evaluate_text import token_ids_of
from turbojax.models.model import Model, load_model
from turbojax.models.native import load_native_model

ROWS = 128  # whose logits are held at a time


@functools.partial(jax.jit, donate_argnames="state")
def hidden_of(weights: Weights, state: EngineState, batch: object) -> tuple[EngineState, jax.Array]:
    """Hidden states of a chunk."""
    pool, hidden = forward(weights, state.pool, chunk_rows(state.slots, batch, state.pool.page_len))
    return state.replace(pool=pool), hidden


@jax.jit
def compare(want: Weights, got: Weights, a: jax.Array, b: jax.Array, targets: jax.Array) -> jax.Array:
    """[3, R]: KL(want || got), whether the likeliest tokens agree, and the loss of got."""
    p, q = jax.nn.log_softmax(logits_of(want, a)), jax.nn.log_softmax(logits_of(got, b))
    loss = -jnp.take_along_axis(q, targets[:, None], axis=-1)[:, 0]
    same = (jnp.argmax(p, -1) == jnp.argmax(q, -1)).astype(jnp.float32)
    return jnp.stack([jnp.sum(jnp.exp(p) * (p - q), axis=-1), same, loss])


def all_hidden(weights: Weights, windows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Hidden states and targets of each window's scored rows."""
    for window in windows:
        state = window_state(weights.spec, len(window))
        for chunk in chunks_of(window):
            state, hidden = hidden_of(weights, state, chunk.batch)
            yield np.asarray(hidden)[: chunk.num_scored], np.asarray(chunk.targets)[: chunk.num_scored]


def measure(reference: Model, path: Path, windows: np.ndarray) -> dict[str, object]:
    """The figures of one checkpoint."""
    model = load_native_model(path) if is_native(path) else load_model(path, dtype="float32")
    parts = []
    pairs = zip(all_hidden(reference.weights, windows), all_hidden(model.weights, windows), strict=True)
    for (a, targets), (b, _) in pairs:
        for start in range(0, len(a), ROWS):
            at = slice(start, start + ROWS)
            parts.append(np.asarray(compare(reference.weights, model.weights, a[at], b[at], targets[at])))
    kl, same, loss = np.concatenate(parts, axis=1).mean(1, dtype=np.float64)
    return {"kl": round(float(kl), 6), "top1": round(float(same), 4), "perplexity": round(float(np.exp(loss)), 4)}


def main() -> None:
    """A row a checkpoint, added to a JSON file under the folder's name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    windows = cut_windows(token_ids_of(default_model(), args.text), 1024, args.windows)
    reference = load_model(default_model(), dtype="float32")
    for path in args.checkpoints:
        row = {"checkpoint": path.name, "windows": len(windows), **measure(reference, path, windows)}
        print(json.dumps(row), flush=True)
        if args.json:
            rows = json.loads(args.json.read_text()) if args.json.exists() else []
            rows = [old for old in rows if old["checkpoint"] != path.name] + [row]
            args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
