"""Operators of decoders over rows of tokens, as calls on a tape.

A rule looks at a node (attributes, constants, what is known of its inputs) and returns a `RowNode`, or None if it does
not serve this form: the node is then run by its Python kernel (`kernels.ops`), between two tapes. A `RowNode` writes
its calls whenever a tape is made for some largest number of rows. Rules pack weights once, when the plan is built.
"""
