"""A general ONNX session: any model, arrays in, arrays out.

Knows: sessions, their settings, inputs and results, execution providers, profiling.
Does not know: how an operator is computed (`genai.ops`, `genai.kernels`), decoders, nor onnxruntime's names for all
this, which are a layer over it (`genai.compat.onnxruntime`).

`session` has Session and `config` its settings; `prepare` turns a source into a plan (`plan`, `loop`); `arguments`
checks inputs and results, `tensors` knows DLPack and device memory; `execution_providers` are the plug-ins, and
`cuda_partition` the one for GPUs; `custom_ops` are operators in Python.
"""
