"""Makes the yardstick: a Llama of 33.6 million weights on which quantisation methods are compared.

Its text is what this repository generates (the tasks of `tools/bundled_model`) and what comes with Python: the
sources of the standard library and its docstrings. docs/yardstick.md has the recipe and the figures.
"""
