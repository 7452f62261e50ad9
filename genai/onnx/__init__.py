"""ONNX graphs as typed Python objects: read, changed and written.

Knows: the whole of the ONNX format (IR, functions, subgraphs, every value type, external data) and how to rewrite it.
Does not know: how an operator is computed, what a language model is, or which device will run it.

`ir` holds the objects, `reader` and `writer` move them from and to protobuf, `shapes` infers types, and
`rewrites` improves them.
"""
