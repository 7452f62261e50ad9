"""Tokenizers in the formats in which publishers write them, one file per format: each becomes a tokenizer.json."""
