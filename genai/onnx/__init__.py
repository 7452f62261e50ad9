"""ONNX graphs as typed Python objects: reading, editing and writing.

In scope: the whole ONNX format (IR, functions, subgraphs, all value types, external data), and edits of graphs.
Out of scope: running operators, language models, and devices.

`ir` contains the objects, `reader` and `writer` convert protobuf to these objects and back, and `validate` checks them.
`genai.optimize` infers shapes and rewrites graphs.
"""
