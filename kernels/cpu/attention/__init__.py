"""Attention over paged keys and values, from projected rows to result rows, as native operators.

`phases` is the entry point: it makes the calls of one layer for a program, and divides the rows of each step into work
items. `heads` normalises and rotates heads, and `store` writes new keys and values into their pages. `decode` works on
splits of the context in float32, `prefill` on blocks of tokens, with `amx_products` in bfloat16 or `vector_products` in
float32. The package handles pages, positions and windows, but not graphs, text or scheduling.
"""
