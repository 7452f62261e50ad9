"""Products of rows with weight matrices: packed weights, prepared activations, and the kernels that meet them.

`packing` lays weights out, `activations` rounds rows to the integers that the kernels multiply, `decode` is
for decode numerics (bound by memory), `prefill` for prefill numerics (bound by arithmetic), `dot` is what differs
between instruction sets, and `calls` makes calls of it all.
"""
