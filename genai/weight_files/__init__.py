"""Files of tensors: memory-mapped safetensors and GGUF files, and onnxruntime's adapters."""
