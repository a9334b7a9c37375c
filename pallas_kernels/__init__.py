"""Kernels over arrays: quantised linears and paged mixed-precision attention. Knows nothing of models or files."""
