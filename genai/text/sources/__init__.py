"""Tokenizers in the forms in which publishers write them, one file per form: each becomes a tokenizer.json."""
