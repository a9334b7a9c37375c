"""The residual stream between two linears in one kernel: sum of splits, residual addition, RMSNorm."""

from pallas_kernels.residual_norm.api import add_rms_norm
from pallas_kernels.residual_norm.reference import rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
