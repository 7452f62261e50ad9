"""Files of tensors, read through memory maps: safetensors and GGUF."""
