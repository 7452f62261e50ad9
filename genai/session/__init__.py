"""A general ONNX session: runs any model on arrays.

Contains: sessions, their settings, inputs and results, execution providers, profiling.
Does not contain: the computation of operators (`genai.ops`, `genai.kernels`), decoders, or onnxruntime's API, which is
a layer on top (`genai.compat.onnxruntime`).

`session` contains the class Session, and `config` its settings. `prepare` converts a source to a plan (`plan`, `loop`).
`arguments` checks inputs and results, and `tensors` handles DLPack and device memory. `execution_providers` contains
the interface of plug-ins, and `cuda_partition` the provider for GPUs. `custom_ops` registers operators written in
Python.
"""
