"""GGUF files as checkpoints: metadata as a configuration, tensors by our names, the vocabulary as a tokenizer.json.

The weights keep their format from the file; see `quant.ggml` and `convert.write_prequantized`.
"""
