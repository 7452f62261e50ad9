"""CPU kernels as functions of NumPy arrays, for sessions and quantisation."""
