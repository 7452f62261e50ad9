"""What onnxruntime-genai's API has besides models and tokenizers: Generator, token by token, its rows and its log."""
