"""Matmuls of rows with weight matrices: packed weights, prepared activations, and the kernels that multiply them.

`packing` packs weights, and `activations` quantises rows to the integers that the kernels multiply. `decode` contains
the kernels for decode numerics (memory-bound), and `prefill` the kernels for prefill numerics (compute-bound). `dot`
handles the differences between instruction sets, and `calls` makes calls for all of these kernels.
"""
