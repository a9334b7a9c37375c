"""Picking the next token of each row of logits: greedy, temperature, top-k, top-p, min-p, in one op."""

from pallas_kernels.sampling.api import Samples, sample_tokens

__all__ = ["Samples", "sample_tokens"]
