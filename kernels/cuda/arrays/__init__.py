"""CUDA kernels as functions of arrays, for sessions."""
