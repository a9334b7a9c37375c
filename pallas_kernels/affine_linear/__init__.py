"""Linear with grouped affine codes of 4 and 8 bits (W4A16, W8A16)."""

from pallas_kernels.affine_linear.api import affine_linear, affine_partial
from pallas_kernels.affine_linear.packing import pack, packing_problem, unpack
from pallas_kernels.affine_linear.reference import affine_rows
from pallas_kernels.affine_linear.types import AffineWeights, PackedAffine, affine_weights
from pallas_kernels.linears import sum_partial

__all__ = [
    "AffineWeights",
    "PackedAffine",
    "affine_linear",
    "affine_partial",
    "affine_rows",
    "affine_weights",
    "pack",
    "packing_problem",
    "sum_partial",
    "unpack",
]
