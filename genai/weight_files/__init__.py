"""Files of tensors: safetensors and GGUF, read through memory maps, and adapters of onnxruntime."""
