"""Products with a constant operand, float32 and 8 bits: packed once, multiplied in tiles that stay in registers.

A product is left [M, K] @ right [K, N], both packed in words of four bytes: one float32, or four bytes along K. Left
panels are a few rows, word by word; right panels a few vectors of columns (see `micro`). `product` multiplies them,
in any instruction set; what is done with a finished tile (bias, activation, zero points, rounding to 8 bits) is an
operator of its own. `linear` and `convolution` are what callers use. Knows nothing of nodes or graphs.
"""
