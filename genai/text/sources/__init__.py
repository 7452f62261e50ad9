"""Converters from publishers' tokenizer formats to tokenizer.json, with one module per format."""
