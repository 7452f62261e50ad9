"""Matmuls with a constant operand, in float32 or 8 bits. The operand is packed once and multiplied in register tiles.

A matmul is left [M, K] @ right [K, N], with both operands packed in words of four bytes: one float32, or four bytes
along K. A left panel holds a few rows, word by word; a right panel holds a few vectors of columns (see `micro`).
`product` multiplies panels with any instruction set. Separate operators process finished tiles (bias, activation, zero
points, quantisation to 8 bits). Callers use `linear` and `convolution`. The package is independent of nodes and graphs.
"""
