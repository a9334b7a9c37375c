"""Texts cut into windows and scored with the engine's own steps: what perplexity and the audit are measured on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.core import scoring
from turbojax.core.state import EngineState, init_state
from turbojax.core.steps import PrefillBatch
from turbojax.core.weights import Weights
from turbojax.errors import LiteError
from turbojax.models.spec import ModelSpec

PAGE_LEN = 64
CHUNK_LEN = 1024  # most tokens that one step scores
WINDOW_LEN = 1024

score = jax.jit(scoring.score, donate_argnames="state")


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a window, padded to the length that steps are compiled for.

    Attributes:
        batch: as a step takes it, in slot 0.
        targets: int32 [R], the token behind each row; 0 where there is none.
        num_scored: rows that have one, the first ones.
    """

    batch: PrefillBatch
    targets: jax.Array
    num_scored: int


def cut_windows(token_ids: np.ndarray, window_len: int = WINDOW_LEN, num_windows: int | None = None) -> np.ndarray:
    """The windows that a text falls into, one behind the other; tokens behind the last whole one are left out.

    Args:
        token_ids: [T], of the text.
        window_len: tokens of a window; a text that is shorter is one window by itself.
        num_windows: most windows, from the text's beginning.

    Returns:
        int32 [windows, window_len].

    Raises:
        LiteError: the text has fewer than two tokens: nothing to predict.
    """
    if len(token_ids) < 2:
        raise LiteError(f"the text has {len(token_ids)} tokens; at least 2 are needed to predict one from another")
    window_len = min(window_len, len(token_ids))
    count = min(len(token_ids) // window_len, num_windows or len(token_ids))
    return np.asarray(token_ids[: count * window_len], np.int32).reshape(count, window_len)


def window_state(spec: ModelSpec, window_len: int) -> EngineState:
    """A state with one slot that holds a window. It needs no reset between windows: a token sees those before it."""
    num_pages = -(-padded_len(window_len) // PAGE_LEN)
    state = init_state(spec, num_slots=1, num_pages=num_pages + 1, page_len=PAGE_LEN, max_len=num_pages * PAGE_LEN)
    slots = state.slots
    tables = slots.block_tables.at[0, 0].set(jnp.arange(1, num_pages + 1, dtype=jnp.int32))
    return replace(
        state,
        slots=replace(
            slots,
            block_tables=tables,
            admitted_len=slots.admitted_len.at[0].set(window_len),
            max_len=slots.max_len.at[0].set(num_pages * PAGE_LEN + 1),
        ),
    )


def chunk_len_of(window_len: int) -> int:
    """Rows of the steps that score a window."""
    return min(CHUNK_LEN, -(-window_len // PAGE_LEN) * PAGE_LEN)


def padded_len(window_len: int) -> int:
    """Of a window in whole chunks."""
    size = chunk_len_of(window_len)
    return -(-window_len // size) * size


def chunks_of(window: np.ndarray) -> Iterator[Chunk]:
    """A window [T] as chunks of one size, to run one behind the other from position 0."""
    size = chunk_len_of(len(window))
    for start in range(0, len(window), size):
        tokens, targets = window[start : start + size], window[start + 1 : start + size + 1]
        batch = PrefillBatch(
            tokens=jnp.asarray(np.pad(tokens, (0, size - len(tokens))), jnp.int32),
            starts=jnp.asarray([0, len(tokens)], jnp.int32),
            slots=jnp.zeros(1, jnp.int32),
            history_lens=jnp.asarray([start], jnp.int32),
            is_last=jnp.zeros(1, bool),
        )
        padded = jnp.asarray(np.pad(targets, (0, size - len(targets))), jnp.int32)
        yield Chunk(batch, padded, num_scored=len(targets))


def window_logprobs(weights: Weights, windows: np.ndarray) -> Iterator[np.ndarray]:
    """Log-probability of every token of a window but the first, given those before it in the window.

    Args:
        weights: the model.
        windows: int32 [windows, T].

    Yields:
        float32 [T - 1], natural logs, a window at a time.
    """
    state = window_state(weights.spec, windows.shape[1])
    for window in windows:
        parts = []
        for chunk in chunks_of(window):
            state, logprobs = score(weights, state, chunk.batch, chunk.targets)
            parts.append(np.asarray(logprobs)[: chunk.num_scored])
        yield np.concatenate(parts)


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
        window_nll: mean negative log-probability of a token, by window.
        num_scored_tokens: of all windows together; every window has as many.
    """

    window_nll: tuple[float, ...]
    num_scored_tokens: int

    @property
    def nll(self) -> float:
        return math.fsum(self.window_nll) / len(self.window_nll)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


def perplexity_of(weights: Weights, windows: np.ndarray, done: Callable[[], None] = lambda: None) -> Perplexity:
    """Perplexity over windows that see nothing of each other; the first token of each is not scored.

    `done` is called behind each window.
    """
    losses = []
    for logprobs in window_logprobs(weights, windows):
        losses.append(-float(logprobs.mean(dtype=np.float64)))
        done()
    return Perplexity(tuple(losses), windows.shape[0] * (windows.shape[1] - 1))
