"""The generator of the tokenizer goldens in tests/text/goldens: tiny vocabularies in the layout of each model family.

The generator needs transformers and sentencepiece as references. The tests that read the goldens do not.
"""
