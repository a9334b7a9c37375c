"""Linear with int8 weights (W8A8) and e4m3 weights (FP8), activations quantised by token on the way in."""

from pallas_kernels.eight_bit_linear.api import eight_bit_linear
from pallas_kernels.eight_bit_linear.types import EightBitWeights, eight_bit_weights

__all__ = ["EightBitWeights", "eight_bit_linear", "eight_bit_weights"]
