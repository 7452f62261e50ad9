"""Attention over keys and values in pages: from projected rows to attention's rows, as native operators.

`phases` is the way in: the calls of one layer, for a tape. `steps` writes down for each step how its rows are cut into
work; `eager` runs the same calls from Python with arrays. Inside: `heads` (norm and rotation of one head), `store`,
`few` (decoding: pieces of context, float32), `many` (prefill: blocks of tokens, by `tile_products` of bfloat16 or
`vector_products` of float32).
Knows pages, positions and windows; nothing of graphs, sequences' text or scheduling.
"""
