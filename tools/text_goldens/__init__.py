"""Makes the tokenizer goldens of tests/text/goldens: tiny vocabularies in the layout of each model family.

Needs transformers and sentencepiece as oracles; the tests that read the goldens need neither.
"""
