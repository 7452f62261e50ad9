"""CPU kernels as functions of NumPy arrays: what sessions and quantisation call."""
