"""What follows the qkv projection in one kernel: sum, bias, head norms, RoPE, quantisation, the write into pages."""

from pallas_kernels.rope_write.api import HeadNorm, rope_write
from pallas_kernels.rope_write.reference import apply_rope

__all__ = ["HeadNorm", "apply_rope", "rope_write"]
