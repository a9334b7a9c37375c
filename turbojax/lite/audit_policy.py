"""The cheapest precision of the KV cache, layer by layer, that stays within a KL from the float32 model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from turbojax.kv_policy import KVPolicy
from turbojax.lite.audit import Measured

Layers = tuple[tuple[int, int], ...]
"""(bits of K, bits of V) of every layer."""

Sensitivity = Mapping[tuple[int, int, int], float]
"""KL in nats by (layer, 0 for K or 1 for V, bits): what it costs to have these bits there and 16 everywhere else."""

FEWER_BITS = (8, 4)


@dataclass(frozen=True)
class Proposal:
    """A policy with what it measures, and the KL that it had to stay within."""

    policy: KVPolicy
    measured: Measured
    budget: float


def descent(sensitivity: Sensitivity, num_layers: int, num_bytes: Callable[[Layers], int]) -> list[Layers]:
    """Policies from 16 bits everywhere to the fewest, each with fewer bits than the one before at one place.

    The next place is where a saved byte adds the least KL, as if what places add did not depend on each other.

    Args:
        sensitivity: measured.
        num_layers: of the model.
        num_bytes: of a token at a policy.
    """
    bits = [[16, 16] for _ in range(num_layers)]
    path = [layers_of(bits)]

    def price(move: tuple[int, int, int]) -> tuple[float, tuple[int, int, int]]:
        layer, side, fewer = move
        now = bits[layer][side]
        added = sensitivity[move] - (0.0 if now == 16 else sensitivity[layer, side, now])
        bits[layer][side] = fewer
        saved = num_bytes(path[-1]) - num_bytes(layers_of(bits))
        bits[layer][side] = now
        return max(added, 0.0) / saved, move

    while moves := [move for move in sensitivity if move[2] < bits[move[0]][move[1]]]:
        _, (layer, side, fewer) = min(map(price, moves))
        bits[layer][side] = fewer
        path.append(layers_of(bits))
    return path


def layers_of(bits: list[list[int]]) -> Layers:
    return tuple((k, v) for k, v in bits)


def propose(path: list[Layers], budget: float, measure: Callable[[KVPolicy], Measured], *, hadamard: bool) -> Proposal:
    """The furthest policy of a descent whose measured KL is within the budget.

    KL grows along the path but for noise, so the place is found by halving: 8 measurements for 120 policies. What is
    returned was measured itself, as a whole.
    """
    within, beyond = 0, len(path)
    best = Proposal(KVPolicy(path[0], hadamard), measure(KVPolicy(path[0], hadamard)), budget)
    at = len(path) - 1
    while within < at < beyond:
        policy = KVPolicy(path[at], hadamard)
        measured = measure(policy)
        if measured.kl <= budget:
            within, best = at, Proposal(policy, measured, budget)
        else:
            beyond = at
        at = (within + beyond) // 2
    return best
