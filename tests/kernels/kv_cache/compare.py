"""Holds what one write left in the pages against what another did."""

from __future__ import annotations

import numpy as np

from pallas_kernels.kv_cache import KVPages


def assert_same_writes(found: KVPages, wanted: KVPages, rtol: float = 0.0) -> None:
    """Equal, but for codes at the middle between two: a quotient and a product with the reciprocal round apart.

    `rtol` is for 16-bit pages whose rows were computed in another order before they were rounded.
    """
    for name, bits in (("k", wanted.k_bits), ("v", wanted.v_bits)):
        got, want = np.asarray(getattr(found, name)), np.asarray(getattr(wanted, name))
        if bits == 16:
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=rtol)
            continue
        codes = [
            np.stack([(x >> (bits * j)) & (2**bits - 1) for j in range(16 // bits)]).astype(int) for x in (got, want)
        ]
        assert np.abs(codes[0] - codes[1]).max() <= 1
        assert (codes[0] != codes[1]).mean() < 1e-3
        params = [np.asarray(getattr(x, name + "_params"), np.float32) for x in (found, wanted)]
        np.testing.assert_allclose(*params, rtol=1e-3, atol=1e-6)
