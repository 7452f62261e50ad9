"""A general ONNX session with onnxruntime's API: any model, arrays in, arrays out.

Knows: sessions, their options and inputs, onnxruntime's names for classes and errors, profiling, providers.
Does not know: how a graph is compiled or an operator computed (`genai.runtime`, `genai.kernels`), nor decoders.

`inference_session` holds InferenceSession; `arguments` describes and checks inputs and outputs; `values` has OrtValue,
devices and DLPack; `binding` the I/O binding; `options` the options; `providers` the plug-ins; `preparing` turns a
source into a plan; `errors` the typed errors.
"""
