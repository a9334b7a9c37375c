"""One small linear as AWQ, GPTQ and compressed-tensors hold it, with the configs that say so."""

import numpy as np

from tests.checkpoints import layouts

AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "zero_point": True}
GPTQ = {"quant_method": "gptq"}


def linear(K, N, g, bits, dtype=np.float16, seed=0, low_zero=1):
    """Codes [K, N], zero points and scales [G, N]."""
    rng, G = np.random.default_rng(seed), -(-K // g)
    codes, zero = rng.integers(0, 2**bits, (K, N)), rng.integers(low_zero, 2**bits, (G, N))
    return codes, zero, rng.uniform(0.5, 2, (G, N)).astype(dtype)


ARRAYS = linear(64, 16, 32, 4)
GROUP = np.arange(64) // 32
IN_AWQ, IN_GPTQ = layouts.awq(*ARRAYS), layouts.gptq(*ARRAYS, 4, group=GROUP)
IN_PACKED = layouts.packed(*ARRAYS, 4)
AWQ_32, GPTQ_32 = AWQ | {"group_size": 32}, GPTQ | {"bits": 4, "group_size": 32, "sym": False}
PACKED_32 = layouts.pack_config(4, 32, False)
