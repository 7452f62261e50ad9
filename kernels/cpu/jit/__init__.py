"""The language of CPU kernels and its compiler: Numba compiles a kernel once, and later runs load it from disk."""
