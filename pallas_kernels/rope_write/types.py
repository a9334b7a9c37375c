"""What of a layer's attention input is static, and the arrays that its norms need."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm over each head of q and of k before RoPE: x / rms(x) * (offset + weight).

    Attributes:
        q, k: [L, H] weights.
        eps, offset: scalars.
    """

    q: jax.Array
    k: jax.Array
    eps: float = field(metadata=STATIC)
    offset: float = field(default=0.0, metadata=STATIC)
