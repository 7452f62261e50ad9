"""The parts of onnxruntime-genai's API beyond models and tokenizers: Generator, its token rows, and the log."""
