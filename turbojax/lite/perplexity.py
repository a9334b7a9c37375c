"""`turbojax lite perplexity`: how well a model, as the engine runs it, predicts a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from turbojax.assembly import open_model, progress_bar
from turbojax.configs import EngineConfig
from turbojax.hub import resolve_model
from turbojax.lite.evaluate import Perplexity, cut_windows, perplexity_of
from turbojax.lite.evaluate_text import token_ids_of
from turbojax.program_cache import use_compilation_cache

Say = Callable[[str], None]


def measure_perplexity(
    model: str | None,
    text: Path | None,
    config: EngineConfig,
    *,
    window_len: int,
    num_windows: int | None,
    say: Say,
) -> Perplexity:
    """Perplexity of a model over the windows of a text.

    The text is tokenised as a whole, without a start token, and cut into windows that do not overlap; each is run
    alone from position 0, and all its tokens but the first are scored with equal weight.

    Args:
        model: see `resolve_model`.
        text: a UTF-8 file; None is the built-in text.
        config: its dtype and the bits of its KV cache count, all else does not.
        window_len, num_windows: see `cut_windows`.
        say: hears what goes on.

    Raises:
        TurbojaxError, CheckpointError: model, text or config cannot be used.
    """
    use_compilation_cache()
    path = resolve_model(model)
    windows = cut_windows(token_ids_of(path, text), window_len, num_windows)
    with progress_bar(f"loading {path.name}", total=1) as advance:
        loaded = open_model(path, config, advance)
    jax.block_until_ready(loaded.weights)
    say(f"{len(windows)} windows of {windows.shape[1]} tokens of {text or 'the built-in text'}")
    with progress_bar("scoring", total=len(windows)) as advance:
        return perplexity_of(loaded.weights, windows, lambda: advance(1))
