"""CPU kernels: compiled by Numba once per machine, called through typed functions that check shapes.

A kernel works on a range of rows, tiles or heads without the GIL; `team` shares ranges among threads. Results depend
neither on the number of threads nor, row by row, on the rest of the batch. Activations are float32 [tokens, features].
Knows packed layouts, and nothing of operators' attributes, graphs or sequences. Only `compiler` imports Numba, when a
kernel has to be compiled; the others come from disk.
"""
