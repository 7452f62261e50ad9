"""CPU kernels: compiled by Numba once, run as programs by a pool of threads.

A kernel works on a range of rows, tiles or heads without the GIL. Results depend neither on the number of threads nor,
row by row, on the rest of the batch. Activations are float32 [tokens, features]. Knows ops and packed layouts, and
nothing of graphs or sequences. Functions of arrays and of rows raise ValueError where a shape or type does not fit.
Only `compiler` imports Numba, when a kernel is compiled; the others come from disk.
"""
