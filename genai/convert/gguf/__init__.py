"""GGUF files as checkpoints: metadata becomes a configuration, tensors get our names, the vocabulary a tokenizer.json.

The weights keep the format in which the file has them; see `quant.ggml` and `convert.write_prequantized`.
"""
