"""CPU kernels: compiled once by Numba, run as programs by a thread pool.

A kernel processes a range of rows, tiles or heads without the GIL. A row's results depend neither on the number of
threads nor on the other rows of the batch. Activations are float32 [tokens, features]. The package depends on ops and
packed layouts; it is independent of graphs and sequences. Functions that process arrays or rows raise ValueError for a
wrong shape or type. Only `compiler` imports Numba, and only when a kernel must be compiled; kernels that were compiled
before are loaded from disk.
"""
