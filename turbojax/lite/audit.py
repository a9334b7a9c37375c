"""`turbojax lite audit`: what each precision of weights, keys and values costs against the same model in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_cache.pages import BITS, bytes_per_token
from turbojax.core import steps
from turbojax.core.weights import Weights
from turbojax.kv_policy import KVPolicy
from turbojax.lite.audit_step import compare, hidden_of
from turbojax.lite.evaluate import Chunk, chunks_of, window_state
from turbojax.models.spec import ModelSpec

NUM_GREEDY = 64  # tokens that the float32 model continues a prompt with

_compare = jax.jit(compare, donate_argnames="state")
_hidden_of = jax.jit(hidden_of, donate_argnames="state")
_prefill = jax.jit(steps.prefill, donate_argnames="state")
_decode = jax.jit(steps.decode, static_argnames="num_steps", donate_argnames="state")


@dataclass(frozen=True)
class Measured:
    """A candidate against the float32 model, over the same scored tokens.

    Attributes:
        nll: mean negative log-probability of a token.
        kl: mean KL(float32 || candidate), in nats.
        top1: share of positions where both have the same likeliest token.
        first_divergence: the first of `num_greedy` greedy tokens of the float32 model, from 0, that the candidate
            would not have chosen; None where there is none, or where it was not asked for.
        num_greedy: tokens that were compared.
    """

    nll: float
    kl: float
    top1: float
    first_divergence: int | None = None
    num_greedy: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


@dataclass(frozen=True)
class Reference:
    """What is kept of the float32 model: the hidden states of every chunk, and a greedy continuation."""

    hidden: list[list[jax.Array]]
    greedy_hidden: list[jax.Array]
    greedy_window: np.ndarray


class Audit:
    """Measures candidates on the windows of a text.

    A candidate's weights may be any; its K and V are rounded by layer, see `RoundedPages`. Distributions are compared
    in one pass over a window: of the float32 model only hidden states are kept, 4 * D bytes a token, and its logits
    are made again from them.

    Attributes:
        k_scale: float32 [L, K, H], of keys that are turned, see `rotation.k_scale_of`; None are ones.
        weights: the float32 model's; the spec keeps 16 bits for K and V, which are float32 then.
        windows: int32 [windows, T].
    """

    def __init__(
        self,
        weights: Weights,
        windows: np.ndarray,
        k_scale: np.ndarray | None = None,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self.weights, self.windows = weights, windows
        layer = weights.spec.segments[0].layer
        shape = (weights.spec.num_layers, layer.num_kv_heads, layer.head_dim)
        self.k_scale = np.ones(shape, np.float32) if k_scale is None else k_scale
        self._state = window_state(weights.spec, windows.shape[1])
        hidden = []
        for window in windows:
            hidden.append(self._hidden(window))
            done()
        self.num_greedy = min(NUM_GREEDY, windows.shape[1] // 2)
        continued = self._continued(windows[0])
        self._reference = Reference(hidden, self._hidden(continued), continued)

    @property
    def spec(self) -> ModelSpec:
        return self.weights.spec

    def _hidden(self, window: np.ndarray) -> list[jax.Array]:
        found = []
        for chunk in chunks_of(window):
            self._state, hidden = _hidden_of(self.weights, self._state, chunk.batch)
            found.append(hidden)
        return found

    def _continued(self, window: np.ndarray) -> np.ndarray:
        """A window whose last tokens are the greedy continuation of the others."""
        prompt = window[: len(window) - self.num_greedy]
        *before, last = chunks_of(prompt)
        for chunk in before:
            self._state, _ = _hidden_of(self.weights, self._state, chunk.batch)
        batch = replace(last.batch, is_last=jnp.ones(1, bool))
        self._state, first = _prefill(self.weights, self._state, batch)
        rows = steps.DecodeBatch(jnp.zeros(1, jnp.int32), jnp.asarray([[1, 0, 0, 0]], jnp.int32))
        self._state, more = _decode(self.weights, self._state, rows, num_steps=self.num_greedy - 1)
        return np.concatenate([prompt, np.asarray(first)[:1], np.asarray(more)[:, 0]]).astype(np.int32)

    def measure(
        self, policy: KVPolicy, weights: Weights | None = None, *, num_windows: int | None = None, greedy: bool = False
    ) -> Measured:
        """Runs a candidate.

        Args:
            policy: of K and V.
            weights: rounded ones; None are the float32 model's.
            num_windows: the first ones alone; None is all.
            greedy: find the first token of the greedy continuation that it would not choose.
        """
        candidate = _Candidate.of(policy, self.weights if weights is None else weights)
        pairs = zip(self.windows[:num_windows], self._reference.hidden, strict=False)
        found = [self._compared(candidate, window, hidden) for window, hidden in pairs]
        logprobs, kl, agrees = (np.concatenate(column) for column in zip(*found, strict=True))
        measured = Measured(
            nll=-float(logprobs.mean(dtype=np.float64)), kl=float(kl.mean(dtype=np.float64)), top1=float(agrees.mean())
        )
        if not greedy:
            return measured
        return replace(measured, first_divergence=self._first_divergence(candidate), num_greedy=self.num_greedy)

    def _compared(
        self, candidate: _Candidate, window: np.ndarray, hidden: list[jax.Array]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log-probabilities, KL and agreement of the scored positions of a window."""
        parts: list[tuple[np.ndarray, ...]] = []
        for chunk, reference in zip(chunks_of(window), hidden, strict=True):
            parts.append(self._compared_chunk(candidate, chunk, reference))
        logprobs, kl, agrees = (np.concatenate(column) for column in zip(*parts, strict=True))
        return logprobs, kl, agrees

    def _compared_chunk(self, candidate: _Candidate, chunk: Chunk, reference: jax.Array) -> tuple[np.ndarray, ...]:
        self._state, found = _compare(
            candidate.weights, self.weights, reference, self._state, chunk.batch, chunk.targets,
            candidate.modes, candidate.hadamard, jnp.asarray(self.k_scale),
        )  # fmt: skip
        return tuple(np.asarray(x)[: chunk.num_scored] for x in (found.logprobs, found.kl, found.agrees))

    def _first_divergence(self, candidate: _Candidate) -> int | None:
        """Fed with the float32 model's tokens, a candidate agrees up to the first one that it would not have chosen."""
        _, _, agrees = self._compared(candidate, self._reference.greedy_window, self._reference.greedy_hidden)
        differs = np.flatnonzero(~agrees[-self.num_greedy :])
        return int(differs[0]) if differs.size else None


@dataclass(frozen=True)
class _Candidate:
    weights: Weights
    modes: jax.Array
    hadamard: jax.Array

    @classmethod
    def of(cls, policy: KVPolicy, weights: Weights) -> _Candidate:
        modes = [[BITS.index(k), BITS.index(v)] for k, v in policy.layers]
        turned = [policy.hadamard and k == 4 for k, _ in policy.layers]
        return cls(weights, jnp.asarray(modes, jnp.int32), jnp.asarray(turned))


def uniform(spec: ModelSpec, k_bits: int, v_bits: int, *, hadamard: bool = False) -> KVPolicy:
    """The same bits in every layer."""
    return KVPolicy(((k_bits, v_bits),) * spec.num_layers, hadamard)


def at_layer(spec: ModelSpec, layer: int, k_bits: int, v_bits: int, *, hadamard: bool = False) -> KVPolicy:
    """Fewer bits in one layer; the others keep 16."""
    layers = [(16, 16)] * spec.num_layers
    layers[layer] = (k_bits, v_bits)
    return KVPolicy(tuple(layers), hadamard)


def kv_bytes_per_token(spec: ModelSpec, policy: KVPolicy) -> int:
    """Of all layers together; 16 bits are two bytes, whatever the audit computes in."""
    heads = [
        (segment.layer.num_kv_heads, segment.layer.head_dim)
        for segment in spec.segments
        for _ in range(segment.num_layers)
    ]
    layers = zip(heads, policy.layers, strict=True)
    return sum(bytes_per_token(kv_heads, dim, k_bits=k, v_bits=v) for (kv_heads, dim), (k, v) in layers)
